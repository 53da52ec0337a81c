"""Encode rows of answers: token ids, a mask of the answers, and the images that they show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fsd_core.errors import DataError
from fsd_core.text.conversations import row_conversation, row_questions, template_options
from fsd_core.text.image_rows import has_row_images
from fsd_core.text.masks import encode_conversation
from fsd_train.data.images import ImageReader, SequenceImages

MAX_ID = 2**31 - 1  # ids are kept as 32-bit numbers
COMPLETE = (None, "stop", "tool_calls", "function_call")  # finish reasons of answers that end with an end token
Sequenced = tuple[list[int], list[int], SequenceImages | None]  # ids, loss mask, images


def encode_row(
    row: Mapping[str, Any], tokenizer: Any, where: str = "row", max_length: int | None = None
) -> list[tuple[list[int], list[int]]]:
    """Return token ids and loss mask of a row's sequences: one, or several by `encode_conversation`.

    ``prompt_ids`` and ``response_ids`` are used unchanged. Other rows are conversations (see
    :func:`.row_conversation`), encoded with the chat template and :func:`template_options` like in decoding; every
    assistant turn is an answer.

    Args:
        row: the row.
        tokenizer: tokenizer for rows without ids; may be None otherwise.
        where: name of the row in errors, "file:line".
        max_length: answers that begin after so many tokens may be left out.

    Raises:
        DataError: the row has neither form, its ids are malformed, or the template refuses it.
    """
    if has_row_images(row):
        row_questions(row, where)  # its error names the turn, if one has the image
        cure = "leave such rows out" if tokenizer is not None else "set data.tokenizer if the target takes images"
        raise DataError(f"{where}: the row has an image, and rows are read as text: {cure}.")
    encoded = _encoded_ids(row, where)
    if encoded is not None:
        return [encoded]
    if tokenizer is None:
        raise DataError(f"{where}: no prompt_ids and response_ids, and no tokenizer for the text. Set data.tokenizer.")
    with _placed_errors(where):
        complete = row.get("finish_reason") in COMPLETE
        turns, options = row_conversation(row, where), template_options(row)
        return encode_conversation(tokenizer, turns, complete, options, max_length)


def _encoded_ids(row: Mapping[str, Any], where: str) -> tuple[list[int], list[int]] | None:
    """Return ids and mask of a row that has ids, or None. Raises DataError."""
    if row.get("response_ids") is None and row.get("prompt_ids") is None:
        return None
    prompt, response = (token_ids(row, field, where) for field in ("prompt_ids", "response_ids"))
    row.get("response")  # the same answer as text
    return prompt + response, [0] * len(prompt) + [1] * len(response)


@contextmanager
def _placed_errors(where: str) -> Iterator[None]:
    """Let a DataError within the block begin with the row."""
    try:
        yield
    except DataError as error:
        if str(error).startswith(where):
            raise
        raise DataError(f"{where}: {error}") from error


def encode_row_with_images(
    row: Mapping[str, Any], reader: ImageReader, sources: Sequence[Any], where: str, max_length: int
) -> list[Sequenced]:
    """Return ids, loss mask and images of a row's sequences, cut after their last answers; marks stand for its images.

    Raises DataError as :func:`encode_row`, or for an image that cannot be read.
    """
    with _placed_errors(where):
        encoded = _encoded_ids(row, where)
        if encoded is not None:
            sequences: list[Sequenced] = [(*encoded, None)]
        else:
            complete = row.get("finish_reason") in COMPLETE
            turns, options = row_conversation(row, where), template_options(row)
            sequences = [*reader.conversation(turns, sources, complete, options, max_length)]
        cut: list[Sequenced] = []
        for ids, mask, images in sequences:
            end = max((index + 1 for index, answers in enumerate(mask[:max_length]) if answers), default=0)
            if end and (images is None or end < len(ids)):  # so that no image is cut
                images = reader.select(ids[:end], sources)
            cut.append((ids[:end], mask[:end], images))
        return cut


def token_ids(row: Mapping[str, Any], field: str, where: str) -> list[int]:
    """Return a row's field of token ids. Raises DataError if it is none."""
    ids = row.get(field)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i <= MAX_ID for i in ids):
        raise DataError(
            f"{where}: `{field}` must be a list of token ids (whole numbers from 0 to {MAX_ID}), and not empty."
        )
    return ids


def check_id(token: int, where: str, vocab_size: int) -> None:
    """Raise DataError if a token id of the row ``where`` is outside a vocabulary."""
    if token >= vocab_size:
        raise DataError(
            f"{where}: token id {token} is outside the target's vocabulary of {vocab_size}. "
            "Regenerate the answers with this target."
        )
