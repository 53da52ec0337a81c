"""Serve one method of this package or of transformers over the protocol of :mod:`fsd_bench.process`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from fsd_bench.base import Method
from fsd_bench.methods import make_methods
from fsd_bench.models import Models
from fsd_bench.settings import RunOptions
from fsd_core.errors import FsdError
from fsd_core.options import set_threads


def private_stdout() -> TextIO:
    """Return standard output for answers. Everything else that this process prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def serve(method: Method, out: TextIO) -> None:
    """Answer the questions on standard input until the input ends."""
    _reply(out, {})
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if "describe" in question:
                _reply(out, method.describe())
            else:
                _reply(out, asdict(method.answer(question["prompts"], question["options"], question["seed"])))
        except FsdError as error:
            _reply(out, {"error": str(error)})


def _reply(out: TextIO, content: dict[str, Any]) -> None:
    print(json.dumps(content), file=out, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m fsd_bench.worker SETTINGS METHOD``. Return 2 after bad input."""
    settings_text, text = sys.argv[1:] if argv is None else argv
    out = private_stdout()
    try:
        settings = RunOptions.from_dict(json.loads(settings_text))
        set_threads(settings.threads)
        method = make_methods([text], Models(settings))[0]
    except FsdError as error:
        _reply(out, {"error": str(error)})
        return 2
    serve(method, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
