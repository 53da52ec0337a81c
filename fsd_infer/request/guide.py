"""Structured output: a grammar follows every path of the draft tree and forbids the tokens that leave it.

A guide is a logits processor, a function of the text. So every rule keeps its law relative to the masked target, and
no rule emits a token that the mask forbids. The grammars are llguidance's (`pip install 'fsd-toolkit[guided]'`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsd_infer.device.transfer import to_device
from fsd_infer.errors import FsdError, imported
from fsd_infer.files import STRICT_JSON

MOST_TEXT = 1 << 20  # characters of a grammar
# JSON as json.dumps writes it: a model cannot fill its answer with white space, and more tokens are forced
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
Trees = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]  # tokens and parents, as in DraftTree.nodes


@dataclass(frozen=True)
class Guide:
    """What an answer must be. Make one by :meth:`json_schema`, :meth:`json_object`, :meth:`regex` or :meth:`lark`.

    Attributes:
        grammar: as llguidance serialises it.
    """

    grammar: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Guide:
        """Answers that are JSON of this schema, on one line, with white space after commas and colons.

        ``"x-guidance": {"whitespace_flexible": true}`` in the schema allows white space anywhere.

        Raises:
            FsdError: a schema that is malformed or not supported.
        """
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            STRICT_JSON.decode(text)
        except ValueError as error:
            raise FsdError(f"the schema is no JSON: {error}.") from error
        return cls._checked("grammar_from_json_schema", text, "schema", COMPACT)

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
    def _checked(cls, maker: str, text: str, what: str, *options: Any) -> Guide:
        matcher = _llguidance().LLMatcher
        if not isinstance(text, str):
            raise FsdError(f"a {what} is text, got {type(text).__name__}.")
        if len(text) > MOST_TEXT:
            raise FsdError(f"the {what} has {len(text):,} characters, more than {MOST_TEXT:,}: give a shorter one.")
        try:
            made = getattr(matcher, maker)(text, *options)
            problem = matcher.validate_grammar(made)
        except ValueError as error:
            problem = str(error)
        if problem:
            raise FsdError(f"the {what} cannot be followed: {_reason(problem)}")
        return cls(made)


class GuideProcessor:
    """A logits processor: ids [M, T], scores [M, V] -> [M, V], -inf where a token would leave the grammar.

    A complete answer may only end. The scores of a text that has left the grammar or has ended stay as they are: no
    walk reaches such a text. Each row of a request has a :class:`Follower` of its own.

    Args:
        guide: what answers must be.
        tokenizer: of the target; a fast one.
        vocab_size: V.
        eos: tokens that end an answer.
        start: position in the ids where answers begin.

    Raises:
        FsdError: a tokenizer that llguidance cannot read.
    """

    def __init__(self, guide: Guide, tokenizer: Any, vocab_size: int, eos: frozenset[int], start: int) -> None:
        self.start, self.eos, self.vocab_size = start, eos, vocab_size
        self._matcher = _llguidance().LLMatcher(_vocabulary(tokenizer, vocab_size, tuple(sorted(eos))), guide.grammar)
        self._followers: dict[int | None, Follower] = {}

    def follower(self, row: int | None = None) -> Follower:
        """Return the follower of one row of the request; None: of texts that nobody has assigned to rows."""
        if row not in self._followers:
            self._followers[row] = Follower(self._matcher.deep_copy(), self.vocab_size, self.eos)
        return self._followers[row]

    def forced(self, row: int, answer: list[int]) -> list[int]:
        """Return the tokens that the grammar forces after the answer of a row."""
        return self.follower(row).forced(answer)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        follower = self.follower()
        bits = [follower.masks(text, [0], [0])[0] for text in input_ids[:, self.start :].tolist()]
        return _masked(scores, np.stack(bits))

    def nodes(self, scores: Tensor, trees: Trees, texts: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        """Mask the scores at every node of draft trees, [B, N, V].

        Args:
            scores: of the target or the drafter.
            trees: tokens and parents of the nodes, [B][N] each.
            texts: per row the token ids before the root, as processors see them.
            rows: their numbers in the request.
        """
        bits = [
            self.follower(row).masks([*text.tolist(), tokens[0]][self.start :], tokens, parents)
            for row, text, tokens, parents in zip(rows, texts, *trees, strict=True)
        ]
        return _masked(scores, np.stack(bits))


class Follower:
    """One row's matcher, which follows the paths of draft trees from the state at the text's end.

    Args:
        matcher: llguidance's, in its first state.
        vocab_size: V.
        eos: tokens that end an answer.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos: frozenset[int]) -> None:
        self.matcher, self.eos = matcher, eos
        self.width = (vocab_size + 31) // 32 * 4  # bytes of a mask
        self._taken: list[int] = []  # the text that the matcher has read
        self._last: tuple[Any, Any] = (None, None)  # the masks of the last tree

    def masks(self, answer: list[int], tokens: Sequence[int], parents: Sequence[int]) -> Any:
        """Return what may follow each node, [N, bytes] as bits of an array of numpy.

        Args:
            answer: tokens of the answer up to the root; none if the root is the prompt's last token.
            tokens: [N] of the nodes, the root first.
            parents: [N] of the nodes.
        """
        key = (answer, list(tokens), list(parents))
        if self._last[0] == key:
            return self._last[1]
        found = np.full((len(tokens), self.width), 255, dtype=np.uint8)
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents[1:], 1):
            children[parent].append(node)
        open_: list[tuple[int, int]] = []  # nodes, and the length of the text before each
        if self.eos.isdisjoint(answer) and self._read(answer):
            found[0] = self._mask()
            open_ = [(child, len(answer)) for child in children[0]]
        while open_:  # depth first, so that the matcher goes back to a parent and never to the beginning
            node, length = open_.pop()
            self._back_to(length)
            if tokens[node] in self.eos or not self._take(tokens[node : node + 1]):
                continue
            found[node] = self._mask()
            open_ += [(child, length + 1) for child in children[node]]
        self._last = (key, found)
        return found

    def forced(self, answer: list[int]) -> list[int]:
        """Return the tokens that the grammar forces after an answer.

        The grammar forces their text. Other tokens of the same text are allowed too, so these are drafts.
        """
        if not self._read(answer) or self.matcher.is_stopped():
            return []
        return list(self.matcher.compute_ff_tokens())

    def _mask(self) -> Any:
        if self.matcher.is_error():
            raise FsdError(f"the guide cannot go on: {_reason(self.matcher.get_error())}")
        if not self.matcher.is_stopped():
            return np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)[: self.width]  # it has a word more
        ends = np.zeros(self.width, dtype=np.uint8)
        for token in self.eos:
            ends[token // 8] |= 1 << token % 8
        return ends

    def _read(self, answer: list[int]) -> bool:
        """Bring the matcher to the end of an answer. Return whether the answer is within the grammar."""
        common = 0
        while common < min(len(answer), len(self._taken)) and answer[common] == self._taken[common]:
            common += 1
        self._back_to(common)
        return self._take(answer[common:])

    def _back_to(self, length: int) -> None:
        if length < len(self._taken):
            self.matcher.rollback(len(self._taken) - length)
            del self._taken[length:]

    def _take(self, tokens: Sequence[int]) -> bool:
        count = self.matcher.try_consume_tokens(list(tokens))
        self._taken += tokens[:count]
        return bool(count == len(tokens))


def _masked(scores: Tensor, bits: Any) -> Tensor:
    """scores [..., V] with -inf at tokens whose bit in ``bits`` [..., bytes] is 0."""
    forbidden = np.unpackbits(~bits, axis=-1, count=scores.shape[-1], bitorder="little")
    return scores.masked_fill(to_device(torch.from_numpy(forbidden).view(torch.bool), scores.device), -torch.inf)


def _llguidance() -> Any:
    return imported("llguidance", "structured output", "guided")


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, vocab_size: int, eos: tuple[int, ...]) -> Any:
    """The tokenizer as llguidance reads it. Reading takes about a second, so the last few are kept."""
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos) or None)
    except Exception as error:
        raise FsdError(f"structured output needs a fast tokenizer with an end-of-text token: {error}") from error


def _reason(text: str) -> str:
    """Return a message's first line, and the line that explains it."""
    lines = text.strip().splitlines()
    explained = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([line[:300] for line in [*lines[:1], *explained[:1]]]) or "unknown reason"
