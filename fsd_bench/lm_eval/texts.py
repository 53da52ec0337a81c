"""Texts between the harness and the model: conversations inside documents, and where answers end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from fsd_infer.serving.text import AnswerText


class Conversation(str):
    """A document's text that remembers its turns, since the harness passes a document on as one user turn."""

    turns: list[dict[str, Any]]

    @classmethod
    def of(cls, turns: Sequence[Mapping[str, Any]]) -> Conversation:
        """Return the turns' texts, separated by blank lines: what models without a chat template continue."""
        result = cls("\n\n".join(str(turn["content"]) for turn in turns))
        result.turns = [dict(turn) for turn in turns]
        return result


def with_turns(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the harness's messages with a document's own turns in the place of its text."""
    return [
        turn
        for message in history
        for turn in (message["content"].turns if isinstance(message["content"], Conversation) else [dict(message)])
    ]


class Until(StoppingCriteria):
    """Ends an answer at a text of a task's ``until``, which transformers' criterion would also find in the prompt.

    Args:
        tokenizer: decodes the answer.
        until: as for :func:`cut`.
        start: length of the padded prompts in tokens.
    """

    def __init__(self, tokenizer: Any, until: Sequence[str], start: int) -> None:
        self.tokenizer, self.start = tokenizer, start
        self.until = [text for text in until if text]
        self.tail = max((len(text.encode()) for text in self.until), default=0) + 8  # a token has a byte or more

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([self._ends(row) for row in input_ids[:, self.start :].tolist()], device=input_ids.device)

    def _ends(self, answer: list[int]) -> bool:
        # the tail's text may differ at its begin: a character without its first bytes, a space that is left out
        return self._may_end(answer[-self.tail :]) and cut(self.tokenizer, answer, self.until)[1]

    def _may_end(self, tail: list[int]) -> bool:
        texts = [self.tokenizer.decode(tail, skip_special_tokens=left_out) for left_out in (True, False)]
        return any(stop in text for stop in self.until for text in texts)


def cut(tokenizer: Any, answer: Sequence[int], until: Sequence[str]) -> tuple[str, bool]:
    """Return the text of an answer up to the first text of ``until``, and whether there is one.

    Args:
        tokenizer: decodes the answer.
        answer: token ids.
        until: may hold names of special tokens, such as ``<|im_end|>``; empty ones are ignored.
    """
    text = AnswerText(tokenizer, [stop for stop in until if stop])
    stops = any(text.add(token) for token in answer)
    text.end()
    return text.text, stops
