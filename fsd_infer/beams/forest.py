"""The texts of all beams of one prompt as one tree of tokens, in one row of the key-value cache.

The prompt lies in the cache's first slots. Behind it every token of any beam, and every draft, has a slot of its own,
wherever one is free, and a mask says which slots it may attend to: the prompt, its ancestors and itself. So what beams
share is read and stored once, reordering beams moves nothing, and one forward over M tokens of one row reads them all.
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
Guess = tuple[list[float], list[int]]  # log-probabilities, falling, and their tokens


class Node:
    """A token of a beam's text, or a draft of one.

    Attributes:
        token, parent, children: the tree; children by their token. The root, the prompt's last token, has no parent.
        position: in the text.
        slot: in the cache; -1 where it has none yet.
        sees: bit s is set iff slot s after the prompt may be attended to.
        key: names the path from the root, in 64 bits.
        logits: where the target's logits lie, (tensor [M, V], row); None: the target has not read the token.
        likely: the target's processed log-probabilities of its likeliest successors, falling, and their tokens; None:
            not looked at yet. The request's processors are applied, in its context.
        rest: sum of the exponentials of the processed log-probabilities that are not in ``likely``.
        proposed: a drafter's guess of ``likely``; None: not asked.
        read: what a drafter's model has read of it: 0 nothing, 1 with the estimated feature of its parent, 2 with all
            that it will ever know.
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
        """The node of this successor, made if there is none."""
        found = self.children.get(token)
        if found is None:
            key = mixed((self.key + GOLDEN * (token + 1)) & WORD)
            found = self.children[token] = Node(token, self, self.position + 1, key)
        return found

    @property
    def slot_before(self) -> int:
        """The slot of the token before this one."""
        return self.slot - 1 if self.parent is None else self.parent.slot

    @property
    def follows_read(self) -> bool:
        """Has the target read the token before this one?"""
        return self.parent is None or self.parent.logits is not None

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, without the root, upwards."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def text(self) -> list[int]:
        """The tokens after the prompt up to this one."""
        return [node.token for node in self.path()][::-1]


def mixed(key: int) -> int:
    """A one-to-one map of 64-bit numbers that looks random (the finalizer of splitmix64, Steele et al. 2014)."""
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & WORD
    return key ^ (key >> 31)


class Forest:
    """The nodes of one prompt and their slots.

    Args:
        prompt: its token ids.
        slots: of its row of the cache, the prompt's included. The last one is spare: nothing ever attends to it.
        key: of the root.
    """

    def __init__(self, prompt: Sequence[int], slots: int, key: int) -> None:
        self.prompt, self.base = list(prompt), len(prompt)
        self.root = Node(prompt[-1], None, len(prompt) - 1, key)
        self.root.slot = len(prompt) - 1
        self.positions = torch.arange(slots)  # of what lies in each slot
        self.used = len(prompt)  # slots from 0 on that have ever been taken
        self.shared = self.root  # the last node that all live beams share
        self._free: list[int] = []
        self.spare = slots - 1

    @property
    def room(self) -> int:
        """How many nodes can still be placed."""
        return self.spare - self.used + len(self._free)

    def place(self, node: Node) -> None:
        """Give it a slot: the first that is free."""
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
        """Forget a node and all below it."""
        assert node.parent is not None
        del node.parent.children[node.token]
        waiting = [node]
        while waiting:
            gone = waiting.pop()
            waiting += gone.children.values()
            if gone.slot >= 0:
                heappush(self._free, gone.slot)

    def prune(self, before: Sequence[Node], now: Sequence[Node]) -> None:
        """After a step of the search: drop what no live beam descends from, but nothing below a live beam.

        Args:
            before: the beams that were live.
            now: the beams that are; children of those.
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
        """Drop what is below live beams."""
        for node in live:
            for child in list(node.children.values()):
                self.drop(child)


@dataclass
class Begun:
    """What a proposer gets to know of a batch of B prompts.

    Attributes:
        forests: of the prompts that are being answered; whoever made the list takes finished ones out.
        slots: of a row of the cache.
        tokens: [B, M] of the prompts, right-padded, on the CPU.
        lengths: [B] how many of them are real, on the CPU.
        features: [B, slots, F] the target's, by slot, filled in as it reads; None where no drafter asks for them.
    """

    forests: list[Forest]
    slots: int
    tokens: Tensor
    lengths: Tensor
    features: Tensor | None = None


@dataclass
class Layout:
    """New tokens of all rows as a forward takes them, on the model's device.

    Attributes:
        tokens, positions, slots: [B, M]. Rows with fewer tokens repeat their last, rows without any have a token in the
            spare slot.
        visible: [B, M, S] bool, which of the first S slots each may attend to.
        at: [B, S] positions of what lies in the slots.
        before: [B, M] slots of the tokens before these.
        start: the first slot, if there is one row whose slots follow each other.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    visible: Tensor
    at: Tensor
    before: Tensor
    start: int | None


def lay_out(forests: Sequence[Forest], nodes: Sequence[Sequence[Node]], device: torch.device) -> Layout:
    """One forward over ``nodes``, some of each forest's, all of which are placed."""
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
    """[M, count] bool: bit s of each mask."""
    size = -(-count // 8)
    whole = bytearray(b"".join(mask.to_bytes(size, "little") for mask in masks))
    packed = torch.frombuffer(whole, dtype=torch.uint8).view(len(masks), size, 1)
    return (packed >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten(1)[:, :count]
