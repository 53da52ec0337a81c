"""The page as one HTML document, for finished answers or for a server, and the rounds that it shows."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from torch import Tensor

from fsd_core.divergence import divergence, expand_draft
from fsd_core.text.pieces import Pieces, token_pieces
from fsd_infer.engine.ngrams import kinds
from fsd_infer.engine.request import Round
from fsd_infer.rules import RULES, TokenOrigin

KNOBS = {  # rule -> its slider's parameter, lower bound, upper bound, first value
    "quality": ("quality", 0.8, 1.0, 1.0),  # no rule, but what chooses one by the calibration file
    "tilted": ("deviation_cost", 0.0, 4.0, 1.0),
    "fuzzy": ("threshold", 0.0, 0.69, 0.3),
    "typical": ("epsilon", 0.0, 1.0, 0.09),
    "relaxed": ("delta", 0.0, 1.0, 0.6),
    "lenient": ("lenience", 0.05, 1.0, 0.5),
    "cactus": ("delta", 0.0, 2.0, 0.25),
    "cascade-token": ("alpha", 0.0, 1.0, 0.3),
    "fly": ("entropy", 0.0, 2.0, 0.3),
    "asd": ("budget", 0.0, 32.0, 8.0),
    "mars": ("margin", 0.0, 3.0, 1.0),
    "ensemble": ("weight", 0.05, 1.0, 0.5),
    "random": ("rate", 0.0, 1.0, 0.1),
}
# source by proposer; any other proposer is a "head"
SOURCES = {"memory": "memory", "lookup": "memory", "recycle": "recycle", "guide": "grammar"}


def answers_page(answers: dict[str, list[dict[str, Any]]]) -> str:
    """Return a page that shows answers, title -> :attr:`.PageTrace.rounds`, and requests nothing."""
    return _page({"answers": [{"title": title, "rounds": rounds} for title, rounds in answers.items()]}, "'none'")


def server_page(rule: str) -> str:
    """Return the page of a server, which posts to ``view/decode``. ``rule`` is selected initially."""
    rules = [
        {"name": name, "parameter": dict(zip(("name", "low", "high", "value"), KNOBS[name])) if name in KNOBS else None}
        for name in sorted({*RULES.names(), "quality"})
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


class PageTrace:
    """The rounds of one answer.

    Args:
        tokenizer: tokenizer of the target.
        prompt: token ids.
        proposers: proposers of the drafter, see :attr:`.Drafter.proposers`.

    Attributes:
        rounds: values that :meth:`add` returned, in order. The first is the prefill, without nodes.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], proposers: Sequence[str]) -> None:
        self.tokenizer, self.prompt = tokenizer, list(prompt)
        self.proposers = [SOURCES.get(name, "head") for name in (*proposers, "guide")]  # as ForcedDrafter does
        self.tokens: list[int] = []
        self._pieces = Pieces(tokenizer)
        self.rounds: list[dict[str, Any]] = []

    def add(self, round: Round) -> dict[str, Any]:
        """Add a round. Return its seconds by phase, the tree's nodes and the emitted tokens."""
        log_p = round.logits.float().log_softmax(-1)
        log_q = _draft_log_probs(round, log_p.shape[-1])
        result = {
            **{name: round.seconds.get(name, 0.0) for name in ("draft", "target", "rule")},
            "nodes": self._nodes(round, log_p, log_q) if self.rounds else [],
            "tokens": self._emitted(round, log_p, log_q),
        }
        if not self.rounds:
            result["target"] = round.seconds.get("prefill", 0.0)
        self.rounds.append(result)
        return result

    def _nodes(self, round: Round, log_p: Tensor, log_q: dict[int, Tensor]) -> list[dict[str, Any]]:
        """Every node, the root first, with its log-probabilities after its parent under target and drafter."""
        accepted = round.path[: len(round.tokens)]
        nodes = []
        for node, (token, parent) in enumerate(zip(round.nodes, round.parents, strict=True)):
            after_parent = log_q.get(parent)
            nodes.append(
                {
                    "text": token_pieces(self.tokenizer, [round.nodes[parent], token])[-1],
                    "parent": parent,
                    "lnp": float(log_p[parent, token]) if node else 0.0,
                    "lnq": None if after_parent is None or not node else _finite(after_parent[token]),
                    "source": self.proposers[round.proposers[node]] if node else None,
                    "accepted": node in accepted,
                }
            )
        return nodes

    def _emitted(self, round: Round, log_p: Tensor, log_q: dict[int, Tensor]) -> list[dict[str, Any]]:
        before = len(self.tokens)
        self.tokens += round.tokens
        pieces = [self._pieces.add(token) for token in round.tokens]
        new_or_not = kinds(self.prompt, self.tokens)
        js = divergence("js")
        entries = []
        for step, emission in enumerate(round.emissions):
            node, index, token = round.path[step], before + step, emission.token
            target, drafter = log_p[node], log_q.get(node)
            best = int(target.argmax())
            entries.append(
                {
                    "text": pieces[step],
                    "source": "target" if emission.proposer < 0 else self.proposers[emission.proposer],
                    "lossy": emission.source == TokenOrigin.GATE,
                    "lnp": _finite(target[token]),
                    "rank": 1 + int((target > target[token]).sum()),
                    "best": token_pieces(self.tokenizer, [*self.tokens[max(index - 1, 0) : index], best])[-1],
                    "best_lnp": float(target[best]),
                    "lnq": None if drafter is None else _finite(drafter[token]),
                    "js": None if drafter is None else float(js(target[None], drafter[None])[0]),
                    "nats": emission.nats,
                    "copied": new_or_not[index] == "copied",
                    "repeated": new_or_not[index] == "repeated",
                }
            )
        return entries


def _draft_log_probs(round: Round, vocabulary: int) -> dict[int, Tensor]:
    """Inner node -> the drafter's log-probabilities [V], -inf outside its vocabulary, if it gave any."""
    logits = expand_draft(round.q_logits.float(), round.draft_ids, vocabulary)
    return {node: logits[row].log_softmax(-1) for node, row in enumerate(round.q_index) if row >= 0}


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if number > -1e30 else None
