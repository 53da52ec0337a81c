"""What the target has read, kept for prompts that begin alike: system prompts, and the turns of a chat.

Of a text that was decoded its token ids, the target's keys and values, and the features that drafters read are kept. A
later prompt is read from where it first differs. What a token's keys, values and features are depends on the tokens up
to it alone, so a law is the same with and without; numbers can differ in their last bits, as those of a prompt read in
one forward and in two do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsd_infer.errors import FsdError

LEAST = 16  # tokens in common: to copy fewer is not worth it


@dataclass(frozen=True)
class Prefix:
    """The start of a text, n tokens.

    Attributes:
        tokens: [n], on the CPU.
        states: keys and values, as :meth:`SlotCache.saved` gives them.
        features: [n, F], the target's.
        watched: the layers that these are of, see :meth:`Target.watch`.
        key: whose it is: only requests with the same key read it.
    """

    tokens: Tensor
    states: dict[Any, Tensor]
    features: Tensor
    watched: tuple[int, ...]
    key: str = ""

    @property
    def nbytes(self) -> int:
        return self.features.nbytes + sum(state.nbytes for state in self.states.values())

    def cut(self, count: int) -> Prefix:
        """Its first ``count`` tokens; nothing is copied."""
        states = {key: state[..., :count, :] for key, state in self.states.items()}
        return Prefix(self.tokens[:count], states, self.features[:count], self.watched, self.key)


class PrefixCache:
    """The texts that were decoded last, within a bound of memory; those used longest ago go first.

    Args:
        max_bytes: of all keys, values and features, on the target's device.

    Raises:
        FsdError: no positive whole number.
    """

    def __init__(self, max_bytes: int) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise FsdError(f"a prefix cache needs a whole number of bytes, at least 1, got {max_bytes!r:.60}.")
        self.max_bytes = max_bytes
        self.texts: list[Prefix] = []  # the one used last at the end

    @property
    def nbytes(self) -> int:
        return sum(text.nbytes for text in self.texts)

    def find(self, prompt: Sequence[int], watched: tuple[int, ...], key: str = "") -> Prefix | None:
        """The longest start that a known text of this key and the prompt share, short of the prompt's last token: its
        logits are wanted.
        """
        wanted = torch.tensor(prompt[:-1])
        known = (watched, key)
        shared = [_shared(text.tokens, wanted) if (text.watched, text.key) == known else 0 for text in self.texts]
        count = max(shared, default=0)
        if count < LEAST:
            return None
        text = self.texts.pop(shared.index(count))
        self.texts.append(text)
        return text.cut(count)

    def store(self, text: Prefix) -> None:
        """Keep a text, in place of those that it begins with."""
        if text.nbytes > self.max_bytes or len(text.tokens) < LEAST:
            return
        others = [
            known
            for known in self.texts
            if known.key != text.key or _shared(known.tokens, text.tokens) < len(known.tokens)
        ]
        self.texts = [*others, text]
        while self.nbytes > self.max_bytes:
            self.texts.pop(0)


def _begins(text: Prefix, known: Prefix) -> bool:
    """Does the text begin with all of a known one of the same key."""
    return known.key == text.key and _shared(known.tokens, text.tokens) == len(known.tokens)


def _shared(one: Tensor, other: Tensor) -> int:
    """How many of their first tokens are the same."""
    count = min(len(one), len(other))
    differ = (one[:count] != other[:count]).nonzero()
    return int(differ[0]) if len(differ) else count
