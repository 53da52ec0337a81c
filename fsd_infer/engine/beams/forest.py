"""The texts of all beams of one prompt as one tree of tokens, in one row of the KV cache.

The prompt occupies the cache's first slots. Each token of a beam, and each draft, takes any free slot after it. A mask
limits attention to the prompt, the token's ancestors and itself. So tokens that beams share are read and stored once,
reordering beams moves nothing, and one forward over M tokens of one row reads all beams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsd_core.tensors import to_device

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
        verified: whether the target has read the token.
        logits: [V] the target's, kept from the verification to the step that takes successors.
        likely: the target's processed log-probabilities of its likeliest successors, and their tokens; None: not
            listed yet.
        rest: total probability of the successors that are not in ``likely``.
        proposed: the drafter's guess of ``likely``; None: not asked.
        read: how a drafter's model has read it: 0 not at all, 1 with the parent's estimated feature, 2 with its final
            one.
    """

    __slots__ = (
        *("token", "parent", "children", "position", "slot", "sees", "key"),
        *("verified", "logits", "likely", "rest", "proposed", "read"),
    )

    def __init__(self, token: int, parent: Node | None, position: int, key: int) -> None:
        self.token, self.parent, self.position, self.key = token, parent, position, key
        self.children: dict[int, Node] = {}
        self.slot, self.sees = -1, 0
        self.verified = False
        self.logits: Tensor | None = None
        self.likely: Guess | None = None
        self.rest = 0.0
        self.proposed: Guess | None = None
        self.read = 0

    def child(self, token: int) -> Node:
        """Return the node of this successor, created on first use."""
        if token not in self.children:
            self.children[token] = Node(token, self, self.position + 1, hash((self.key, token)))
        return self.children[token]

    def path(self) -> Iterator[Node]:
        """Yield this node and its ancestors, without the root, upwards."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def text(self) -> list[int]:
        """Return the tokens after the prompt up to this one."""
        return [node.token for node in self.path()][::-1]


class Forest:
    """The nodes of one prompt and their slots.

    Args:
        prompt: its token ids.
        slots: of its cache row, the prompt's included. The last slot is spare: no token attends to it.
        key: of the root.

    Attributes:
        used: the slots from here on are free.
        trunk: the nodes that all live beams share, the root first.
    """

    def __init__(self, prompt: Sequence[int], slots: int, key: int) -> None:
        self.prompt, self.base, self.used, self.spare = list(prompt), len(prompt), len(prompt), slots - 1
        self.trunk = [Node(prompt[-1], None, len(prompt) - 1, key)]
        self.trunk[0].slot = len(prompt) - 1
        self.positions = torch.arange(slots)  # of the token in each slot
        self._free: list[int] = []  # descending

    def make_room(self, count: int, live: Sequence[Node]) -> None:
        """Free the slots of dropped nodes, and of those below the ``live`` beams if fewer than ``count`` are free."""
        self._sweep()
        if len(self._free) < count:
            for node in live:
                node.children.clear()
            self._sweep()

    def _sweep(self) -> None:
        taken, waiting = {node.slot for node in self.trunk}, self.trunk[-1:]
        while waiting:
            node = waiting.pop()
            taken.add(node.slot)
            waiting += node.children.values()
        self.used = max(self.base, 1 + max(taken))
        self._free = [slot for slot in range(self.spare - 1, self.base - 1, -1) if slot not in taken]

    def place(self, node: Node) -> None:
        """Assign the first free slot to a node."""
        assert node.parent is not None
        node.slot = self._free.pop()
        node.sees = node.parent.sees | 1 << (node.slot - self.base)
        self.used = max(self.used, node.slot + 1)
        self.positions[node.slot] = node.position

    def prune(self, live: Sequence[Node]) -> None:
        """Drop all nodes but the ``live`` beams, and those above or below them."""
        above, beams = {self.trunk[-1]}, set(live)
        for beam in live:
            for node in beam.path():
                if node in above:
                    break
                above.add(node)
        for node in above - beams:
            node.children = {token: child for token, child in node.children.items() if child in above}
            node.logits = None
        while self.trunk[-1] not in beams and len(self.trunk[-1].children) == 1:
            self.trunk += self.trunk[-1].children.values()


@dataclass
class Begun:
    """A batch of B prompts, as proposers see it.

    Attributes:
        forests: of the unfinished prompts; the engine removes finished ones.
        slots: per cache row.
        tokens: [B, M] of the prompts, right-padded, on the CPU.
        lengths: [B] of the prompts, on the CPU.
        keys: [B] owner of each text, as in DraftRequest; None: the caller.
        features: [B, M, F] of the target at the prompts' tokens.
    """

    forests: list[Forest]
    slots: int
    tokens: Tensor
    lengths: Tensor
    keys: Sequence[str | None]
    features: Tensor


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
        lines = [(node.token, node.position, node.slot, _slot_before(node)) for node in wanted]
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


def _slot_before(node: Node) -> int:
    return node.slot - 1 if node.parent is None else node.parent.slot


def _bits(masks: Sequence[int], count: int) -> Tensor:
    """[M, count] bool, the bits of each mask."""
    size = -(-count // 8)
    packed = np.frombuffer(b"".join(mask.to_bytes(size, "little") for mask in masks), np.uint8)
    bits = np.unpackbits(packed.reshape(len(masks), size), axis=1, count=count, bitorder="little")
    return torch.from_numpy(bits).bool()
