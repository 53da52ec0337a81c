"""Structured output: a grammar follows every path of the draft tree, and forbids what leaves it.

A guide is a logits processor, a function of the text. So every rule keeps its law beside the masked target, and no
rule favours a token that the mask forbids. The grammars are llguidance's (`pip install 'fsd-toolkit[guided]'`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsd_infer.errors import FsdError

MOST_TEXT = 1 << 20  # characters of a grammar


@dataclass(frozen=True)
class Guide:
    """What an answer must be. Make one by :meth:`json_schema`, :meth:`json_object`, :meth:`regex` or :meth:`lark`.

    Attributes:
        grammar: as llguidance serialises it.
    """

    grammar: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Guide:
        """Answers that are JSON of this schema. Raises FsdError for a schema that is malformed or not supported."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            json.loads(text)
        except ValueError as error:
            raise FsdError(f"the schema is no JSON: {error}.") from error
        return cls._checked("grammar_from_json_schema", text, "schema")

    @classmethod
    def json_object(cls) -> Guide:
        """Answers that are any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Guide:
        """Answers that a regular expression matches as a whole. Raises FsdError for a malformed one."""
        return cls._checked("grammar_from_regex", pattern, "regular expression")

    @classmethod
    def lark(cls, grammar: str) -> Guide:
        """Answers of a grammar in Lark's notation. Raises FsdError for a malformed one."""
        return cls._checked("grammar_from_lark", grammar, "grammar")

    @classmethod
    def _checked(cls, maker: str, text: str, what: str) -> Guide:
        matcher = _llguidance().LLMatcher
        if len(text) > MOST_TEXT:
            raise FsdError(f"the {what} has {len(text):,} characters, more than {MOST_TEXT:,}: give a shorter one.")
        try:
            made = getattr(matcher, maker)(text)
            problem = matcher.validate_grammar(made)
        except ValueError as error:
            problem = str(error)
        if problem:
            raise FsdError(f"the {what} cannot be followed: {_first_line(problem)}")
        return cls(made)


class GuideProcessor:
    """A logits processor: ids [M, T], scores [M, V] -> [M, V], -inf where a token would leave the grammar.

    A complete answer may only end. Rows whose text has left the grammar or has ended stay as they are: no walk reaches
    them.

    Args:
        guide: what answers must be.
        tokenizer: of the target; a fast one.
        vocab_size: V.
        eos: tokens that end an answer.
        start: where answers begin in the ids.

    Raises:
        FsdError: a tokenizer that llguidance cannot read.
    """

    def __init__(self, guide: Guide, tokenizer: Any, vocab_size: int, eos: frozenset[int], start: int) -> None:
        self.start, self.eos = start, eos
        self.vocabulary = _vocabulary(tokenizer, vocab_size, tuple(sorted(eos)))
        self.matcher = _llguidance().LLMatcher(self.vocabulary, guide.grammar)
        self.taken: list[int] = []  # the text that the matcher has read

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for answer, row in zip(input_ids[:, self.start :].tolist(), scores, strict=True):
            allowed = self._allowed(answer)
            if allowed is not None:
                row.masked_fill_(~allowed[: len(row)].to(row.device), -torch.inf)
        return scores

    def _allowed(self, answer: list[int]) -> Tensor | None:
        """[V] bool; what may follow. None: anything."""
        if not self.eos.isdisjoint(answer) or not self._read(answer):
            return None
        if self.matcher.is_stopped():
            ends = torch.zeros(self.vocabulary.vocab_size, dtype=torch.bool)
            ends[list(self.eos)] = True
            return ends
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")).view(torch.bool)

    def _read(self, answer: list[int]) -> bool:
        """Bring the matcher to the end of a text; is the text within the grammar."""
        common = 0
        while common < min(len(answer), len(self.taken)) and answer[common] == self.taken[common]:
            common += 1
        if common < len(self.taken):
            self.matcher.rollback(len(self.taken) - common)
            del self.taken[common:]
        new = answer[common:]
        count = self.matcher.try_consume_tokens(new)
        self.taken += new[:count]
        return count == len(new)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise FsdError("structured output needs llguidance: pip install 'fsd-toolkit[guided]'.") from error
    return llguidance


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, vocab_size: int, eos: tuple[int, ...]) -> Any:
    """Takes about a second, so the last few are kept."""
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos) or None)
    except Exception as error:
        raise FsdError(f"structured output needs a fast tokenizer with an end-of-text token: {error}") from error


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else "unknown reason"
