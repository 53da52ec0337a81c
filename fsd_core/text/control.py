"""Control tokens in messages: what users write is text, as in mistral-common, and cannot end a turn or open another.

:func:`escaped` escapes the names of special tokens in messages, a chat template writes its own around them, and
:func:`encode_escaped` encodes the escaped names as ordinary text.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from fsd_core.text.image_marks import begins_as_processors_do, expanded, in_parts
from fsd_core.text.pieces import special_names

_ESCAPE, _LITERAL, _FIRST = "\uf8fe", "\uf8ff", 0xF0000  # private characters: escape, itself, and the first name
_ALLOWED, _KEPT, _PLAIN = "_fsd_control_tokens", "_fsd_control_names", "_fsd_plain"  # attributes of tokenizers
_ESCAPED = re.compile(f"{_ESCAPE}(.)", re.DOTALL)
_BEFORE = ("", "x", "\n", ".")  # texts that a part of a prompt may follow
_Encoded = tuple[list[int], list[tuple[int, int]]]  # ids, and the characters that each stands for


def set_control_tokens(tokenizer: Any, allowed: bool) -> None:
    """Say whether names of special tokens in messages become the tokens. Without a word they do not."""
    vars(tokenizer)[_ALLOWED] = allowed


def escaped(tokenizer: Any, value: Any) -> Any:
    """Return a text with the names of special tokens escaped; lists and objects with all their texts so."""
    if vars(tokenizer).get(_ALLOWED):
        return value
    if isinstance(value, str):
        pattern, codes, _ = _names(tokenizer)
        return pattern.sub(lambda match: _ESCAPE + codes[match[0]], value)
    if isinstance(value, Mapping):
        return {escaped(tokenizer, name): escaped(tokenizer, item) for name, item in value.items()}
    return [escaped(tokenizer, item) for item in value] if isinstance(value, list) else value


def encode_escaped(tokenizer: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """Return the ids of a text, in which escaped names of special tokens are ordinary text."""
    if begins_as_processors_do(tokenizer, text):
        return encode_with_offsets(tokenizer, text)[0]
    if _ESCAPE not in text:
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    if getattr(tokenizer, "is_fast", False):
        return encode_with_offsets(tokenizer, text, add_special_tokens)[0]
    ids: list[int] = list(tokenizer("", add_special_tokens=add_special_tokens)["input_ids"])
    for part, is_special in _parts(tokenizer, text):
        options = {"add_special_tokens": False, "split_special_tokens": not is_special}
        ids += tokenizer(_shown(tokenizer, part), **options)["input_ids"] if part else []
    return ids


def encode_with_offsets(tokenizer: Any, text: str, add_special_tokens: bool = False) -> _Encoded:
    """Return ids and the characters of ``text`` that each stands for, as (start, end). Needs a fast tokenizer."""
    if begins_as_processors_do(tokenizer, text):
        ids, offsets = encode_with_offsets(tokenizer, text[1:], True)
        return ids, [(start + 1, end + 1) if end else (0, 0) for start, end in offsets]
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), [(int(start), int(end)) for start, end in encoded["offset_mapping"]]
    if _ESCAPE not in text:
        return ids, offsets
    index = next((index for index, (_, b) in enumerate(offsets) if b), len(ids))  # after what the tokenizer puts first
    out_ids, out_offsets = ids[:index], offsets[:index]
    start = 0
    for part, is_special in _parts(tokenizer, text):
        end, first = start + len(part), index
        while index < len(ids) and 0 < offsets[index][1] <= end:
            index += 1
        part_ids, spans = ids[first:index], offsets[first:index]
        if not is_special and _ESCAPE in part:
            part_ids, part_spans = _as_text(tokenizer, part, part_ids)
            spans = [(start + a, start + b) for a, b in part_spans]
        out_ids += part_ids
        out_offsets += spans
        start = end
    return out_ids + ids[index:], out_offsets + offsets[index:]


def render_marked(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and begin and end of the parts that generation markers mark.

    Args:
        tokenizer: a fast tokenizer.
        turns: as the template reads them.
        options: further arguments of the template.
    """
    template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    arguments = {**tokenizer.special_tokens_map, **escaped_options(tokenizer, options), "chat_template": template}
    messages = in_parts(tokenizer, escaped_turns(tokenizer, turns))
    rendered: Any = render_jinja_template(conversations=[messages], return_assistant_tokens_mask=True, **arguments)
    (text,), (marked,) = rendered
    return expanded(tokenizer, turns, text, marked)


def escaped_turns(tokenizer: Any, turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return turns with the names of special tokens escaped, but not in their roles."""
    return [{**escaped(tokenizer, turn), "role": turn["role"]} for turn in turns]


def escaped_options(tokenizer: Any, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return arguments of a chat template with the names of special tokens escaped where they hold users' texts."""
    texts = ("tools", "documents")
    return {name: escaped(tokenizer, value) if name in texts else value for name, value in (options or {}).items()}


def _as_text(tokenizer: Any, part: str, encoded: list[int]) -> _Encoded:
    """Encode a part without special tokens. ``encoded`` are its ids as they stand, by which its beginning is chosen.

    Some tokenizers put a space before a text, but not before a part that follows a special token.
    """
    plain = _plain(tokenizer)
    before = next((text for text in _BEFORE if _following(plain, text, part)[0] == encoded), "")
    text = _shown(tokenizer, part)
    ids, spans = _following(plain, before, text)
    starts = _starts(tokenizer, part)  # of every shown character, and of the end
    return ids, [(starts[a], starts[a] if b <= a else starts[b - 1] + _width(part, starts[b - 1])) for a, b in spans]


def _following(plain: Any, before: str, text: str) -> _Encoded:
    """Return the ids of a text that follows another one."""
    encoding = plain.encode(before + text, add_special_tokens=False)
    first = bisect_left([start for start, _ in encoding.offsets], len(before)) if before else 0
    return encoding.ids[first:], [(a - len(before), b - len(before)) for a, b in encoding.offsets[first:]]


def _starts(tokenizer: Any, part: str) -> list[int]:
    """Return for each character of the shown text the place in ``part`` where it, or its escape, begins."""
    starts: list[int] = []
    start = 0
    for match in _ESCAPED.finditer(part):
        starts += [*range(start, match.start()), *[match.start()] * len(_shown(tokenizer, match[0]))]
        start = match.end()
    return [*starts, *range(start, len(part) + 1)]


def _width(part: str, start: int) -> int:
    return 2 if part[start : start + 1] == _ESCAPE else 1


def _shown(tokenizer: Any, text: str) -> str:
    """Return a text without escapes."""
    names = _names(tokenizer)[2]
    return _ESCAPED.sub(lambda match: names.get(match[1], match[0]), text)


def _parts(tokenizer: Any, text: str) -> list[tuple[str, bool]]:
    """Split a text at its special tokens: (part, whether it is one), which joined are the text."""
    pattern = _names(tokenizer)[0]
    parts: list[tuple[str, bool]] = []
    start = 0
    for match in pattern.finditer(text):
        if match[0] != _ESCAPE:
            parts += [(text[start : match.start()], False), (match[0], True)]
            start = match.end()
    return [*parts, (text[start:], False)]


def _names(tokenizer: Any) -> tuple[re.Pattern[str], dict[str, str], dict[str, str]]:
    """Return a pattern of the special tokens' names and of the escape, the code of each, and the name of each code."""
    cache = vars(tokenizer)
    if _KEPT not in cache:
        names = sorted({name for name in special_names(tokenizer).values() if name.strip()}, key=len, reverse=True)
        codes = {name: chr(_FIRST + index) for index, name in enumerate(names)} | {_ESCAPE: _LITERAL}
        names_by_code = {code: name for name, code in codes.items()}
        cache[_KEPT] = re.compile("|".join(map(re.escape, codes))), codes, names_by_code
    return cache[_KEPT]


def _plain(tokenizer: Any) -> Any:
    """Return a copy of a fast tokenizer's core to which special tokens are text. Setting it there would race."""
    cache = vars(tokenizer)
    if _PLAIN not in cache:
        plain = copy.deepcopy(tokenizer.backend_tokenizer)
        plain.encode_special_tokens = True
        plain.no_truncation()
        plain.no_padding()
        cache[_PLAIN] = plain
    return cache[_PLAIN]
