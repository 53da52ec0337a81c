"""The page as one HTML document: for finished answers, or for a server that decodes them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from fsd_infer.rules import RULES

KNOBS = {  # rule -> its slider's parameter, lower bound, upper bound, first value
    "tilted": ("heat", 0.05, 1.0, 0.3),
    "fuzzy": ("threshold", 0.0, 0.69, 0.3),
    "typical": ("epsilon", 0.0, 1.0, 0.09),
    "relaxed": ("delta", 0.0, 1.0, 0.6),
    "lenient": ("lenience", 0.05, 1.0, 0.5),
    "cactus": ("delta", 0.0, 2.0, 0.25),
    "cascade-token": ("alpha", 0.0, 1.0, 0.3),
    "fly": ("entropy", 0.0, 2.0, 0.3),
    "ensemble": ("weight", 0.05, 1.0, 0.5),
    "random": ("rate", 0.0, 1.0, 0.1),
}


def answers_page(answers: dict[str, list[dict[str, Any]]]) -> str:
    """Return a page that shows answers, title -> :attr:`.Trace.rounds`, and requests nothing."""
    return _page({"answers": [{"title": title, "rounds": rounds} for title, rounds in answers.items()]}, "'none'")


def server_page(rule: str) -> str:
    """Return the page of a server, which posts to ``view/decode``. ``rule`` is chosen at first."""
    rules = [
        {"name": name, "parameter": dict(zip(("name", "low", "high", "value"), KNOBS[name])) if name in KNOBS else None}
        for name in sorted(RULES.names())
    ]
    return _page({"rules": rules, "rule": rule}, "'self'")


def _page(data: dict[str, Any], connect: str) -> str:
    # a model's text can add no script, style or resource to the page's own
    policy = (
        f"default-src 'none'; style-src {_digest('style')}; script-src {_digest('script')}; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    content = json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return _template().replace("{{policy}}", policy).replace("{{data}}", content)


@cache
def _template() -> str:
    return files("fsd_infer.serving").joinpath("page.html").read_text(encoding="utf-8")


@cache
def _digest(tag: str) -> str:
    match = re.search(rf"<{tag}>(.*?)</{tag}>", _template(), re.DOTALL)
    assert match is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()}'"
