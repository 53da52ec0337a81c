"""A prefix cache for prompts that share a start: system prompts, and the turns of a chat.

The cache keeps a decoded text's token ids, the target's keys and values, and the features that drafters read. A later
prompt is read from its first differing token. Keys, values and features of a token depend only on the tokens up to it,
so distributions do not change. Numbers may differ in their last bits, as they do when a prompt is read in two forwards.

Recurrent layers keep a state of the whole text. With such layers a prompt must begin with all of a kept text.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MIN_TOKENS = 16  # tokens of the shortest prefix: copying a shorter one costs more than it saves


@dataclass(frozen=True)
class Prefix:
    """The start of a text, n tokens.

    Attributes:
        tokens: [n], on the CPU.
        states: keys and values, as :meth:`SlotCache.saved` returns them.
        features: [n, F] of the target.
        key: the captured layers of ``features``, and the user. Only requests with the same key read it.
    """

    tokens: Tensor
    states: dict[Any, Tensor]
    features: Tensor
    key: Hashable

    @property
    def nbytes(self) -> int:
        return self.features.nbytes + sum(state.nbytes for state in self.states.values())

    @property
    def is_whole(self) -> bool:
        """Whether the states cannot be cut to a shorter prefix."""
        return any(key[0] == "recurrent" for key in self.states)

    def cut(self, count: int) -> Prefix:
        """Return the first ``count`` tokens, without a copy."""
        if count == len(self.tokens):
            return self
        states = {key: state[..., :count, :] for key, state in self.states.items()}
        return Prefix(self.tokens[:count], states, self.features[:count], self.key)


class PrefixCache:
    """Recently decoded texts within a bound of memory; the least recently used are evicted first.

    Args:
        max_bytes: most bytes of all keys, values and features, on the target's device; at least 1.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.texts: list[Prefix] = []  # the most recently used last

    @property
    def nbytes(self) -> int:
        return sum(text.nbytes for text in self.texts)

    def find(self, prompt: Sequence[int], key: Hashable) -> Prefix | None:
        """Return the longest start that a kept text of this key shares with the prompt, or None.

        It excludes the prompt's last token, whose logits the request needs.
        """
        tokens = torch.tensor(prompt[:-1])
        shared = [_shared(text.tokens, tokens) if text.key == key else 0 for text in self.texts]
        shared = [0 if x.is_whole and count < len(x.tokens) else count for x, count in zip(self.texts, shared)]
        count = max(shared, default=0)
        if count < MIN_TOKENS:
            return None
        text = self.texts.pop(shared.index(count))
        self.texts.append(text)
        return text.cut(count)

    def store(self, text: Prefix) -> None:
        """Keep a text in place of its own prefixes. One whose states cannot be cut replaces only its equal."""
        if text.nbytes > self.max_bytes or len(text.tokens) < MIN_TOKENS:
            return
        others = [
            other
            for other in self.texts
            if other.key != text.key
            or _shared(other.tokens, text.tokens) < len(other.tokens)
            or text.is_whole
            and len(other.tokens) < len(text.tokens)
        ]
        self.texts = [*others, text]
        while self.nbytes > self.max_bytes:
            self.texts.pop(0)


def _shared(one: Tensor, other: Tensor) -> int:
    """Return the length of the common prefix."""
    count = min(len(one), len(other))
    differ = (one[:count] != other[:count]).nonzero()
    return int(differ[0]) if len(differ) else count
