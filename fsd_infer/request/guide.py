"""Structured output: a grammar follows every path of the draft tree and forbids the tokens that leave it.

A guide is a logits processor, a function of the text. So every rule keeps its distribution relative to the masked
target, and no rule emits a token that the mask forbids. The grammars are llguidance's (`pip install
'fsd-toolkit[guided]'`).
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

from fsd_core.errors import FsdError, foreign_errors, shortened
from fsd_core.files import STRICT_JSON
from fsd_core.registry import did_you_mean
from fsd_core.tensors import to_device
from fsd_core.text.conversations import check_text
from fsd_infer.request.grammar_child import TOO_DEEP
from fsd_infer.request.grammars import compiled, reason, serialised

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
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            STRICT_JSON.decode(text)
        except RecursionError as error:
            raise FsdError(f"the schema cannot be followed: {reason(TOO_DEEP)}") from error
        except (TypeError, ValueError) as error:
            raise FsdError(f"the schema is not JSON: {shortened(error)}.") from error
        return cls._checked("grammar_from_json_schema", text, "schema", json.dumps(COMPACT))

    @classmethod
    def of(cls, value: Guide | Mapping[str, Any] | None) -> Guide | None:
        """Return a guide, None unchanged, given as a Guide or as ``{"json": schema}``, ``{"regex": pattern}`` or
        ``{"grammar": text}``. Raises FsdError for others.
        """
        if value is None or isinstance(value, Guide):
            return value
        makers: dict[Any, Any] = {"json": cls.json_schema, "regex": cls.regex, "grammar": cls.lark, "llguidance": cls}
        if not isinstance(value, Mapping) or len(value) != 1:
            raise FsdError('a guide is a Guide, or one of {"json": ...}, {"regex": ...} and {"grammar": ...}.')
        ((name, text),) = value.items()
        if name not in makers:
            hint = did_you_mean(name, makers)
            raise FsdError(f"unknown kind of guide {name!r}.{hint} Known: {', '.join(list(makers)[:3])}.")
        result: Guide = makers[name](text)
        return result

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
    def _checked(cls, maker: str, text: str, what: str, options: str = "") -> Guide:
        if not isinstance(text, str):
            raise FsdError(f"a {what} is text, got {type(text).__name__}.")
        return cls(serialised(maker, check_text(text, f"the {what}"), what, options))


class GuideProcessor:
    """A logits processor: ids [M, T], scores [M, V] -> [M, V], -inf where a token would leave the grammar.

    A complete answer may only end. The scores of a text that has left the grammar or has ended stay as they are: no
    walk reaches such a text. Each row of a request has a :class:`Follower` of its own.

    Args:
        guide: what answers must be.
        tokenizer: tokenizer of the target; a fast one.
        vocab_size: V.
        eos: tokens that end an answer.
        start: position in the ids where answers begin.

    Raises:
        FsdError: a tokenizer that llguidance cannot read.
    """

    def __init__(self, guide: Guide, tokenizer: Any, vocab_size: int, eos: frozenset[int], start: int) -> None:
        self.start, self.eos, self.vocab_size = start, eos, vocab_size
        self._matcher = compiled(_vocabulary(tokenizer, vocab_size, tuple(sorted(eos))), guide.grammar)
        self._followers: dict[int | None, Follower] = {}

    def follower(self, row: int | None = None) -> Follower:
        """Return the follower of one row of the request; None: that of texts without a row."""
        if row not in self._followers:
            self._followers[row] = Follower(self._matcher, self.vocab_size, self.eos, strict=row is not None)
        return self._followers[row]

    def check(self, answers: Sequence[list[int]]) -> None:
        """Raise FsdError unless the request's answers are within the grammar, as far as they have come."""
        for row, answer in enumerate(answers):
            self.follower(row).check(answer)

    def forced(self, row: int, answer: list[int]) -> list[int]:
        """Return the tokens that the grammar forces after the answer of a row."""
        return self.follower(row).forced(answer)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        follower = self.follower()
        bits = [follower.masks(text, [0], [0])[0] for text in input_ids[:, self.start :].tolist()]
        return _masked(scores, np.stack(bits))

    def mask_nodes(self, scores: Tensor, trees: Trees, texts: Sequence[Tensor | None], rows: Sequence[int]) -> Tensor:
        """Mask the scores at every node of draft trees, [B, N, V].

        Args:
            scores: scores of the target or the drafter.
            trees: tokens and parents of the nodes, [B][N] each.
            texts: per row the token ids before the root, as processors see them; None: the row's scores stay.
            rows: their numbers in the request.
        """
        request_rows = zip(rows, texts, *trees, strict=True)
        bits = [self._bits(row, text, tokens, parents) for row, text, tokens, parents in request_rows]
        return _masked(scores, np.stack(bits))

    def _bits(self, row: int, text: Tensor | None, tokens: Sequence[int], parents: Sequence[int]) -> Any:
        """Return :meth:`Follower.masks` of a row's tree; all bits of a row without a text."""
        follower = self.follower(row)
        if text is None:
            return np.full((len(tokens), follower.width), 255, dtype=np.uint8)
        return follower.masks([*text.tolist(), tokens[0]][self.start :], tokens, parents)


class Follower:
    """One row's matcher, which follows the paths of draft trees from the state at the text's end.

    A matcher may fail on a text, and after a failure its masks allow every token. The text may be a draft that no walk
    reaches, so only a failure on the answer itself raises FsdError.

    Args:
        matcher: llguidance's, in its first state.
        vocab_size: V.
        eos: tokens that end an answer.
        strict: whether the text before a tree is the answer. If not, it may be a beam that has left the grammar.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos: frozenset[int], strict: bool = True) -> None:
        self._first, self.matcher, self.eos, self.strict = matcher, matcher.deep_copy(), eos, strict
        self.width = (vocab_size + 31) // 32 * 4  # bytes of a mask
        self._taken: list[int] = []  # the text that the matcher has read
        self._last: tuple[Any, Any] = (None, None)  # the masks of the last tree
        self._ends = np.zeros(self.width, dtype=np.uint8)  # the mask that allows only the end
        for token in eos:
            self._ends[token // 8] |= 1 << token % 8

    def masks(self, answer: list[int], tokens: Sequence[int], parents: Sequence[int]) -> Any:
        """Return what may follow each node, [N, bytes] as bits of a numpy array.

        Args:
            answer: tokens of the answer up to the root; none if the root is the prompt's last token.
            tokens: [N] of the nodes, the root first.
            parents: [N] of the nodes.

        Raises:
            FsdError: the answer has left the grammar, or its next token cannot be found.
        """
        key = (answer, list(tokens), list(parents))
        if self._last[0] == key:
            return self._last[1]
        masks = np.full((len(tokens), self.width), 255, dtype=np.uint8)
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents[1:], 1):
            children[parent].append(node)
        open_ = [(0, answer)] if self.eos.isdisjoint(answer) else []  # nodes, and the text that ends at each
        while open_:  # depth first, so that the matcher goes back to a parent and never to the beginning
            node, text = open_.pop()
            try:
                self._read(text, len(answer) if node else 0)
                masks[node] = self._mask()
            except FsdError:
                if self.strict and node == 0:
                    raise
                masks[node] = ~self._ends  # an answer that comes here does not end here, so its own failure will raise
            else:
                open_ += [(child, [*text, tokens[child]]) for child in children[node] if tokens[child] not in self.eos]
        self._last = (key, masks)
        return masks

    def forced(self, answer: list[int]) -> list[int]:
        """Return the tokens that the grammar forces after an answer. Raises FsdError as :meth:`masks` does.

        The grammar forces their text. Other tokens of the same text are allowed too, so these are drafts.
        """
        self._read(answer)
        return [] if self.matcher.is_stopped() else list(self.matcher.compute_ff_tokens())

    def check(self, answer: list[int]) -> None:
        """Raise FsdError unless an answer is within the grammar and, if it has an end, the grammar may end there."""
        ends = [index for index, token in enumerate(answer) if token in self.eos]
        self._read(answer[: min(ends, default=len(answer))])
        if ends and not (self.matcher.is_accepting() or self.matcher.is_stopped()):
            raise FsdError("the answer ends where the guide does not.")

    def _mask(self) -> Any:
        if not self.matcher.is_stopped():
            mask = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)[: self.width]  # it has a word more
            self._refuse_failure()
            return mask
        return self._ends

    def _read(self, text: list[int], same: int = 0) -> None:
        """Bring the matcher to the end of a text; it has read the first ``same`` tokens unless it failed.

        Raises:
            FsdError: the text leaves the grammar, or the matcher fails.
        """
        both = min(len(text), len(self._taken))
        common = both if text[same:both] == self._taken[same:both] else min(same, both)
        while common < both and text[common] == self._taken[common]:
            common += 1
        if common < len(self._taken):
            self.matcher.rollback(len(self._taken) - common)
            del self._taken[common:]
        count = self.matcher.try_consume_tokens(text[common:])
        self._taken += text[common : common + count]
        self._refuse_failure()
        if len(self._taken) < len(text):
            raise FsdError(f"the answer leaves the guide with its token {len(self._taken)}.")

    def _refuse_failure(self) -> None:
        """Raise FsdError if the matcher has failed, and begin again with another one."""
        if self.matcher.is_error():
            cause = reason(self.matcher.get_error())
            self.matcher, self._taken = self._first.deep_copy(), []
            raise FsdError(f"the guide cannot go on after this text: {cause}")


def _masked(scores: Tensor, bits: Any) -> Tensor:
    """scores [..., V] with -inf at tokens whose bit in ``bits`` [..., bytes] is 0."""
    forbidden = np.unpackbits(~bits, axis=-1, count=scores.shape[-1], bitorder="little")
    return scores.masked_fill(to_device(torch.from_numpy(forbidden).view(torch.bool), scores.device), -torch.inf)


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, vocab_size: int, eos: tuple[int, ...]) -> Any:
    """The tokenizer as llguidance reads it. Reading takes about a second, so the last few are kept."""
    from llguidance.hf import from_tokenizer

    with foreign_errors(FsdError, "structured output needs a fast tokenizer with an end-of-text token: {why}"):
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos) or None)
