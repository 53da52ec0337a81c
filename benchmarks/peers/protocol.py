"""Serve the protocol of :mod:`fsd_bench.process` from an environment without this package."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[..., dict[str, Any]]


def serve(load: Callable[[], tuple[Answer, dict[str, Any]]], batches: bool = False) -> None:
    """Load, then answer one prompt or one batch at a time until standard input ends.

    Args:
        load: returns a function (prompt's token ids, new tokens, temperature, seed) -> answer, and what a record stores
            about the method. An answer has ``seconds``, ``first`` (seconds until the first new token), ``stopped``, and
            ``tokens`` or else ``text`` and ``count``. With drafts it also has ``verified`` and ``forwards``. If the
            question has a JSON schema, the function gets it as ``schema``.
        batches: whether the function takes a list of prompts and returns ``seconds``, ``first`` and ``answers``.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print

    def reply(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=out, flush=True)

    try:
        answer, facts = load()
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"})
        sys.exit(2)
    reply({})
    for line in sys.stdin:
        question = json.loads(line)
        if "describe" in question:
            reply(facts)
            continue
        options = question["options"]
        temperature = (options.get("temperature") or 1.0) if options.get("do_sample") else 0.0
        prompts = question["prompts"]
        if len(prompts) > 1 and not batches:
            reply({"error": "answers one prompt at a time. Use --batch-size 1."})
            continue
        schema = {"schema": options["schema"]} if "schema" in options else {}
        prompt = prompts if batches else prompts[0]
        run = answer(prompt, options["max_new_tokens"], temperature, question["seed"], **schema)
        answers = [
            {
                "tokens": result.get("tokens"), "text": result.get("text"), "counted": result.get("count", 0),
                "finish_reason": "stop" if result["stopped"] else "length",
                "target_forwards": result.get("forwards"), "verified_tokens": result.get("verified"),
            }
            for result in (run["answers"] if batches else [run])
        ]  # fmt: skip
        reply({"seconds": run["seconds"], "prefill_seconds": run["first"], "answers": answers})
