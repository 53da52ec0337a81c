"""The texts of all beams of one prompt as one tree of tokens, in one row of the KV cache.

The prompt occupies the cache's first slots. Each token of a beam, and each draft, takes any free slot after it. A mask
limits attention to the prompt, the token's ancestors and itself. So tokens that beams share are read and stored once,
reordering beams moves nothing, and one forward over M tokens of one row reads all beams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor

from fsd_infer.device.transfer import to_device

GOLDEN, WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
Guess = tuple[list[float], list[int]]  # log-probabilities, descending, and their tokens


class Node:
    """A token of a beam's text, or a draft of one.

    Attributes:
        token: its id.
        parent: None at the root, the prompt's last token.
        children: by their token.
        position: in the text.
        slot: in the cache; -1 before it is placed.
        sees: bit s is set if the token may attend to slot s after the prompt.
        key: a 64-bit hash of the path from the root.
        logits: (tensor [M, V], row) of the target's logits; None: the target has not read the token.
        likely: the target's processed log-probabilities of its likeliest successors, and their tokens; None: not
            listed yet.
        rest: total probability of the successors that are not in ``likely``.
        proposed: the drafter's guess of ``likely``; None: not asked.
        read: how a drafter's model has read it: 0 not at all, 1 with the parent's estimated feature, 2 with its final
            one.
    """

    __slots__ = (
        *("token", "parent", "children", "position", "slot", "sees", "key"),
        *("logits", "likely", "rest", "proposed", "read"),
    )

    def __init__(self, token: int, parent: Node | None, position: int, key: int) -> None:
        self.token, self.parent, self.position, self.key = token, parent, position, key
        self.children: dict[int, Node] = {}
        self.slot, self.sees = -1, 0
        self.logits: tuple[Tensor, int] | None = None
        self.likely: Guess | None = None
        self.rest = 0.0
        self.proposed: Guess | None = None
        self.read = 0

    def child(self, token: int) -> Node:
        """Return the node of this successor, created on first use."""
        child = self.children.get(token)
        if child is None:
            key = mixed((self.key + GOLDEN * (token + 1)) & WORD)
            child = self.children[token] = Node(token, self, self.position + 1, key)
        return child

    @property
    def slot_before(self) -> int:
        """The slot of the token before this one."""
        return self.slot - 1 if self.parent is None else self.parent.slot

    @property
    def follows_read(self) -> bool:
        """Whether the target has read the token before this one."""
        return self.parent is None or self.parent.logits is not None

    def path(self) -> Iterator[Node]:
        """Yield this node and its ancestors, without the root, upwards."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def text(self) -> list[int]:
        """Return the tokens after the prompt up to this one."""
        return [node.token for node in self.path()][::-1]


def mixed(key: int) -> int:
    """Hash a 64-bit number one-to-one (the finalizer of splitmix64, Steele et al. 2014)."""
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & WORD
    return key ^ (key >> 31)


class Forest:
    """The nodes of one prompt and their slots.

    Args:
        prompt: its token ids.
        slots: of its cache row, the prompt's included. The last slot is spare: no token attends to it.
        key: of the root.
    """

    def __init__(self, prompt: Sequence[int], slots: int, key: int) -> None:
        self.prompt, self.base = list(prompt), len(prompt)
        self.root = Node(prompt[-1], None, len(prompt) - 1, key)
        self.root.slot = len(prompt) - 1
        self.positions = torch.arange(slots)  # of the token in each slot
        self.used = len(prompt)  # number of slots, from 0, that were ever taken
        self.shared = self.root  # the last node that all live beams share
        self._free: list[int] = []
        self.spare = slots - 1

    @property
    def room(self) -> int:
        """The number of nodes that can still be placed."""
        return self.spare - self.used + len(self._free)

    def place(self, node: Node) -> None:
        """Assign the first free slot to a node."""
        if self._free:
            node.slot = heappop(self._free)
        else:
            node.slot = self.used
            self.used += 1
        assert node.slot < self.spare, "the cache was made too small"
        self.positions[node.slot] = node.position
        assert node.parent is not None
        node.sees = node.parent.sees | 1 << (node.slot - self.base)

    def drop(self, node: Node) -> None:
        """Remove a node and its subtree."""
        assert node.parent is not None
        del node.parent.children[node.token]
        waiting = [node]
        while waiting:
            gone = waiting.pop()
            waiting += gone.children.values()
            if gone.slot >= 0:
                heappush(self._free, gone.slot)

    def prune(self, before: Sequence[Node], now: Sequence[Node]) -> None:
        """After a search step, drop nodes that are neither ancestors of live beams nor below them.

        Args:
            before: the live beams before the step.
            now: the live beams, children of those.
        """
        alive = set(now)
        for beam in before:
            for child in [child for child in beam.children.values() if child not in alive]:
                self.drop(child)
            node = beam
            while node.parent is not None and not node.children and node not in alive:
                self.drop(node)
                node = node.parent
        while self.shared not in alive and len(self.shared.children) == 1:
            (self.shared,) = self.shared.children.values()

    def trim(self, live: Sequence[Node]) -> None:
        """Drop the nodes below live beams."""
        for node in live:
            for child in list(node.children.values()):
                self.drop(child)


@dataclass
class Begun:
    """A batch of B prompts, as proposers see it.

    Attributes:
        forests: of the unfinished prompts; the engine removes finished ones.
        slots: per cache row.
        tokens: [B, M] of the prompts, right-padded, on the CPU.
        lengths: [B] of the prompts, on the CPU.
        keys: [B] owner of each text, as in DraftRequest; None: the caller.
        features: [B, slots, F] of the target, by slot, filled as it reads; None if no drafter reads features.
    """

    forests: list[Forest]
    slots: int
    tokens: Tensor
    lengths: Tensor
    keys: Sequence[str | None]
    features: Tensor | None = None


@dataclass
class Layout:
    """The arguments of a forward over new tokens of all rows, on the model's device.

    Attributes:
        tokens: [B, M]. Rows with fewer tokens repeat their last; empty rows have a token in the spare slot.
        positions: [B, M].
        slots: [B, M].
        visible: [B, M, S] bool, which of the first S slots each token may attend to.
        at: [B, S] positions of the tokens in the slots.
        before: [B, M] slots of the tokens before these.
        start: the first slot, if there is one row with consecutive slots.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    visible: Tensor
    at: Tensor
    before: Tensor
    start: int | None


def lay_out(forests: Sequence[Forest], nodes: Sequence[Sequence[Node]], device: torch.device) -> Layout:
    """Return the arguments of one forward over ``nodes``, placed nodes of each forest."""
    most = max(map(len, nodes))
    used = max(forest.used for forest in forests)
    numbers: list[list[tuple[int, int, int, int]]] = []
    visible = torch.zeros(len(nodes), most, used, dtype=torch.bool)
    for row, (forest, wanted) in enumerate(zip(forests, nodes, strict=True)):
        lines = [(node.token, node.position, node.slot, node.slot_before) for node in wanted]
        lines += [lines[-1] if lines else (0, 0, forest.spare, 0)] * (most - len(lines))
        numbers.append(lines)
        visible[row, :, : forest.base] = True
        if wanted and forest.used > forest.base:
            seen = [node.sees for node in wanted] + [wanted[-1].sees] * (most - len(wanted))
            visible[row, :, forest.base : forest.used] = _bits(seen, forest.used - forest.base)
    at = torch.stack([forest.positions[:used] for forest in forests])
    parts: Any = (to_device(part, device) for part in (*torch.tensor(numbers).unbind(-1), visible, at))
    tokens, positions, slots, before, visible, at = parts
    first = numbers[0][0][2]
    run = len(nodes) == 1 and all(line[2] == first + place for place, line in enumerate(numbers[0]))
    return Layout(tokens, positions, slots, visible, at, before, first if run else None)


def _bits(masks: Sequence[int], count: int) -> Tensor:
    """[M, count] bool, the bits of each mask."""
    size = -(-count // 8)
    whole = bytearray(b"".join(mask.to_bytes(size, "little") for mask in masks))
    packed = torch.frombuffer(whole, dtype=torch.uint8).view(len(masks), size, 1)
    return (packed >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten(1)[:, :count]
