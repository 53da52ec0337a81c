"""Whether training reads prompts as serving makes them: the same chat template, system prompt and thinking mode."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsd_core.errors import DataError
from fsd_core.text.conversations import template_options
from fsd_core.text.encoding import encode_chat, encode_text
from fsd_core.text.row_check import RowCheck
from fsd_core.text.rows import read_rows
from fsd_train.repository import find

log = logging.getLogger(__name__)
LOOKED_AT = 32  # rows of each file
SHOWN = 80  # characters at the place where two prompts part


def differences(rows: Iterable[Mapping[str, Any]], tokenizer: Any) -> list[str]:
    """Return what differs between the prompts of rows and those that serving would make of the same messages."""
    compared, differing, options = 0, list[tuple[list[int], list[int]]](), Counter[str]()
    for row in rows:
        ids, messages = row.get("prompt_ids"), row.get("messages")
        asked = template_options(row)
        asked_here = {name: value for name, value in asked.items() if name != "tools"}
        if asked_here:
            options[json.dumps(asked_here, sort_keys=True)] += 1
        if not ids or not messages or not getattr(tokenizer, "chat_template", None):
            continue
        compared += 1
        try:
            ours = encode_chat(tokenizer, messages, options=asked)
        except DataError:
            ours = []
        if ids != ours and not (len(messages) == 1 and ids == encode_text(tokenizer, messages[0]["content"])):
            differing.append((ids, ours))
    said = []
    if differing:
        theirs, made = (_parting(pair, tokenizer) for pair in (differing[0], differing[0][::-1]))
        said.append(
            f"{len(differing)} of {compared} prompts are not what this target's chat template makes of their messages: "
            f"{theirs!r}, in serving {made!r}. Regenerate the answers, or serve with the template and system prompt of "
            "the data."
        )
    said += [
        f"{count} rows were made with the template arguments {text}: serve with the same (chat_template_kwargs), or "
        "the head meets prompts that it was not trained on."
        for text, count in options.items()
    ]
    return said


def warn_of_differences(files: Sequence[str | Path], tokenizer: Any) -> None:
    """Log :func:`differences` of the first rows of files."""
    if tokenizer is None:
        return
    check = RowCheck()
    rows = [row.values for path in files for row in itertools.islice(read_rows(find(path), check), LOOKED_AT)]
    for said in differences(rows, tokenizer):
        log.warning(said)


def _parting(pair: tuple[list[int], list[int]], tokenizer: Any) -> str:
    """Return the text of the first ids from a little before they leave the second."""
    ids, others = pair
    same = next((place for place, (a, b) in enumerate(zip(ids, others)) if a != b), min(len(ids), len(others)))
    text = str(tokenizer.decode(ids[max(same - 4, 0) :]))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
