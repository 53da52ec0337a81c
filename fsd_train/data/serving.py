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
from fsd_core.text.conversations import check_messages, template_options
from fsd_core.text.encoding import encode_chat, encode_text
from fsd_core.text.row_check import RowCheck
from fsd_core.text.rows import read_rows
from fsd_train.data.row_encoding import token_ids
from fsd_train.repository import find

log = logging.getLogger(__name__)
LOOKED_AT = 32  # rows of each file
SHOWN = 80  # characters at the place where two prompts part


def prompt_pair(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """Return a row's prompt ids, and those that serving would make of the same messages.

    None if the row lacks either, if there is no chat template, or if the row is malformed: what trains on rows takes
    account of those. The second ids are empty if the template refuses the messages.
    """
    if not row.get("prompt_ids") or not row.get("messages") or not getattr(tokenizer, "chat_template", None):
        return None
    try:
        ids, turns = token_ids(row, "prompt_ids", "row"), check_messages(row["messages"])
        options = template_options(row)
    except DataError:
        return None
    try:
        served = encode_chat(tokenizer, turns, options=options)
    except DataError:
        served = []
    raw = len(turns) == 1 and ids == encode_text(tokenizer, turns[0]["content"])  # a prompt without a template
    return None if raw else (ids, served)


def _template_arguments(row: Mapping[str, Any]) -> str:
    """Return a row's arguments of the chat template except for tools as text, empty without any or if malformed."""
    try:
        arguments = {name: value for name, value in template_options(row).items() if name != "tools"}
    except DataError:
        return ""
    return json.dumps(arguments, sort_keys=True) if arguments else ""


def differences(rows: Iterable[Mapping[str, Any]], tokenizer: Any) -> list[str]:
    """Return what differs between the prompts of rows and those that serving would make of the same messages."""
    pairs, options = list[tuple[list[int], list[int]]](), Counter[str]()
    for row in rows:
        pair, arguments = prompt_pair(row, tokenizer), _template_arguments(row)
        pairs += [] if pair is None else [pair]
        options.update([arguments] if arguments else [])
    compared, differing = len(pairs), [pair for pair in pairs if pair[0] != pair[1]]
    warnings = []
    if differing:
        trained, serving = (_excerpt_at_difference(pair, tokenizer) for pair in (differing[0], differing[0][::-1]))
        warnings.append(
            f"{len(differing)} of {compared} prompts are not what this target's chat template makes of their messages: "
            f"{trained!r}, in serving {serving!r}. Regenerate the answers, or serve with the template and system "
            "prompt of the data."
        )
    warnings += [
        f"{count} rows were made with the template arguments {text}: serve with the same (chat_template_kwargs), or "
        "the head meets prompts that it was not trained on."
        for text, count in options.items()
    ]
    return warnings


def warn_of_differences(files: Sequence[str | Path], tokenizer: Any) -> None:
    """Log :func:`differences` of the first rows of files."""
    if tokenizer is None:
        return
    check = RowCheck()
    rows = [row.values for path in files for row in itertools.islice(read_rows(find(path), check), LOOKED_AT)]
    for warning in differences(rows, tokenizer):
        log.warning(warning)


def _excerpt_at_difference(pair: tuple[list[int], list[int]], tokenizer: Any) -> str:
    """Return the text of the first ids from a little before they leave the second."""
    ids, others = pair
    same = next((index for index, (a, b) in enumerate(zip(ids, others)) if a != b), min(len(ids), len(others)))
    text = str(tokenizer.decode(ids[max(same - 4, 0) :]))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
