"""Two vocabularies as one: tokens with the same bytes mean the same, as ``Ġthe`` and ``▁the``, ``A`` and ``<0x41>``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fsd_core.errors import VocabularyMismatchError
from fsd_core.text.pieces import TokenBytes, special_names
from fsd_infer.targets.target import Target

MIN_SHARED = 0.05  # of the target's tokens; single bytes are 0.8 % of 32 000


class Vocabulary:
    """The tokens of one model: what each adds to a text.

    Args:
        tokenizer: a transformers tokenizer.
        size: entries of the model's logits. Tokens beyond are left out.

    Attributes:
        special: names of special tokens by id.
        raw: bytes by id of the other tokens, those without bytes left out.
        first: the first token of each string of bytes that is not a byte token of SentencePiece, if there is one.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer, self.size = tokenizer, size
        self.special = special_names(tokenizer)
        spelled, names = TokenBytes(tokenizer), tokenizer.get_vocab()
        plain = sorted(token for token in set(names.values()) - self.special.keys() if token < size)
        self.raw = {token: raw for token in plain if (raw := spelled(token))}
        self.first: dict[bytes, int] = {}
        fallbacks = {token for name, token in names.items() if name.startswith("<0x")}
        for token in sorted(self.raw, key=lambda token: (token in fallbacks, token)):
            self.first.setdefault(self.raw[token], token)
        self._longest = max(map(len, self.first), default=0)

    def spell(self, raw: bytes) -> list[int]:
        """Return the tokens of these bytes, each the longest that fits. Bytes that no token begins are left out."""
        tokens, start = [], 0
        while start < len(raw):
            ends = range(min(len(raw), start + self._longest), start, -1)
            end = next((end for end in ends if raw[start:end] in self.first), 0)
            if end:
                tokens.append(self.first[raw[start:end]])
            start = end or start + 1
        return tokens

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens that are not special."""
        return b"".join(self.raw.get(token, b"") for token in tokens)

    def split(self, raw: bytes) -> list[int]:
        """Return the tokens of these bytes as the tokenizer splits them, the bytes of broken characters spelled.

        The tokenizer may begin a text with a space of its own. The bytes returned then have it, too.
        """
        complete, rest = _whole_characters(raw)
        ids = self.tokenizer(complete.decode(), add_special_tokens=False, verbose=False).input_ids if complete else []
        if not self.bytes_of(ids).endswith(complete):  # the tokenizer changes such texts
            ids = self.spell(complete)
        return [token for token in ids if token in self.raw] + self.spell(rest)

    def after(self, before: Sequence[int], raw: bytes) -> list[int]:
        """Return tokens of these bytes after fixed tokens, as the tokenizer splits both; of a token across, the rest.

        Args:
            before: tokens that are not special, from the beginning of a character on.
            raw: the bytes after them.
        """
        tokens, left = list[int](), len(raw)
        for token in reversed(self.split(self.bytes_of(before) + raw)):
            size = len(self.raw[token])
            if size > left:
                break
            tokens, left = [token, *tokens], left - size
        return self.spell(raw[:left]) + tokens

    def again(self, before: Sequence[int], raw: bytes) -> tuple[int, list[int]]:
        """Return how many of the tokens ``before`` stay when these bytes follow, and the tokens after those.

        What precedes the first border between tokens that both ways of splitting have stays, and so do equal tokens
        after it. Arguments as for :meth:`after`.
        """
        tokens = self.split(self.bytes_of(before) + raw)
        borders, left = dict[int, int](), 0  # number of tokens after a border, by the bytes after it
        for count, token in enumerate(reversed(tokens), 1):
            left += len(self.raw[token])
            borders[left] = count
        for unchanged in range(len(before) + 1):
            border = borders.get(len(self.bytes_of(before[unchanged:])) + len(raw))
            if border is not None:
                more = tokens[len(tokens) - border :]
                while unchanged < len(before) and before[unchanged] == more[0]:
                    unchanged, more = unchanged + 1, more[1:]
                return unchanged, more
        return len(before), self.spell(raw)


class Translation:
    """Two vocabularies as one: which tokens are shared, and how each model's tokens are written in the other's.

    Args:
        model: the small LM.
        target: the model to draft for. Both have tokenizers.

    Attributes:
        special: our token for each special one of the target's that we have too, and for the end of a text.
        ids: [I] the target's ids of the shared tokens, ascending, on the small LM's device.
        own: [I] the small LM's id of each.
        own_of: [V] the small LM's id of each of the target's tokens; of those that are not shared an arbitrary one.

    Raises:
        VocabularyMismatchError: a model without a tokenizer.
    """

    def __init__(self, model: Target, target: Target) -> None:
        if model.tokenizer is None or target.tokenizer is None:
            raise VocabularyMismatchError("translating between two vocabularies needs the tokenizers of both models.")
        self.names = model.name, target.name
        ours, theirs = (Vocabulary(side.tokenizer, side.vocab_size) for side in (model, target))
        self.ours, self.theirs = ours, theirs
        pairs = {theirs.first[raw]: token for raw, token in ours.first.items() if raw in theirs.first}
        self.special = _special_pairs(ours, theirs)
        pairs |= self.special
        shared = sorted(pairs)
        self.ids, self.own = (
            torch.tensor(ids, dtype=torch.long).to(model.device) for ids in (shared, [pairs[t] for t in shared])
        )
        self.own_of = torch.zeros(target.vocab_size, dtype=torch.long, device=model.device)
        self.own_of[self.ids] = self.own
        index_of = {theirs.raw[token]: index for index, token in enumerate(shared) if token in theirs.raw}
        self._twins = [pairs.to(model.device) for pairs in _twins(ours, index_of)]
        self._spelled: dict[int, list[int]] = {}

    def check_overlap(self) -> None:
        """Raise VocabularyMismatchError if hardly any token is shared."""
        least = math.ceil(MIN_SHARED * len(self.theirs.raw))
        if len(self.ids) < least:
            raise VocabularyMismatchError(
                f"drafter {self.names[0]} and target {self.names[1]} share only {len(self.ids)} of "
                f"{len(self.theirs.raw)} tokens by their bytes, and a drafter of another vocabulary needs {least} "
                f'({MIN_SHARED:.0%}). Let it draft text ("text:{self.names[0]}"), use a small model of a nearer '
                'vocabulary or "lookup+recycle", or train a draft head for this target with fsd-train.'
            )

    def restrict(self, logits: Tensor) -> Tensor:
        """Return ln q, up to a constant, of the shared tokens [..., I] in fp32, from the small LM's logits [..., W]."""
        logits = logits.float()
        shared = logits.index_select(-1, self.own)
        for twins in self._twins:  # [2, D] ids, and the indices to which they add
            sums = shared.index_select(-1, twins[1]).logaddexp(logits.index_select(-1, twins[0]))
            shared = shared.index_copy(-1, twins[1], sums)
        return shared

    def spell(self, token: int) -> list[int]:
        """Return the small LM's tokens for one of the target's."""
        if token not in self._spelled:
            raw = self.theirs.raw.get(token, self.theirs.special.get(token, "").encode())
            twin = self.special.get(token, self.ours.first.get(raw))
            self._spelled[token] = self.ours.spell(raw) if twin is None else [twin]
        return self._spelled[token]

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Return the small LM's tokens, at least one, for the text of the target's, as its own tokenizer makes them."""
        theirs, ours = self.theirs.tokenizer, self.ours.tokenizer
        lead = [token for token in ours("").input_ids if token == ours.bos_token_id and token < self.ours.size][:1]
        if tokens and tokens[0] == theirs.bos_token_id and (lead or tokens[0] not in self.special):
            tokens = tokens[1:]
        ids = lead
        for is_special, run in groupby(tokens, key=self.special.__contains__):
            if is_special:
                ids += [self.special[token] for token in run]
            else:
                text = theirs.decode([token for token in run if token < len(theirs)])
                read = ours(text, add_special_tokens=False, verbose=False).input_ids
                ids += [token for token in read if token < self.ours.size]  # a tokenizer may have more than its model
        return ids or [min(self.ours.raw)]


def _whole_characters(raw: bytes) -> tuple[bytes, bytes]:
    """Split bytes before the first that belongs to no complete character."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return raw[: error.start], raw[error.start :]
    return raw, b""


def _special_pairs(ours: Vocabulary, theirs: Vocabulary) -> dict[int, int]:
    """Return our token for each special token of theirs of the same name, and for the end of a text."""
    names = {name: token for token, name in ours.special.items()}
    pairs = {token: names[name] for token, name in theirs.special.items() if name in names}
    ends = ours.tokenizer.eos_token_id, theirs.tokenizer.eos_token_id
    if None not in ends:
        pairs[ends[1]] = ends[0]
    return {token: ours_id for token, ours_id in pairs.items() if token < theirs.size and ours_id < ours.size}


def _twins(ours: Vocabulary, index_of: dict[bytes, int]) -> list[Tensor]:
    """Return [2, D] each: our further tokens of shared bytes, and the indices of these bytes, once in each."""
    seen: Counter[int] = Counter()
    rounds: dict[int, list[tuple[int, int]]] = {}
    for token, raw in ours.raw.items():
        if raw in index_of and ours.first[raw] != token:
            index = index_of[raw]
            rounds.setdefault(seen[index], []).append((token, index))
            seen[index] += 1
    return [torch.tensor(pairs).T.contiguous() for pairs in rounds.values()]
