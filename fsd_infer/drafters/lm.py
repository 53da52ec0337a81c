"""Draft with an independent small causal LM of the same vocabulary (Leviathan et al., arXiv 2211.17192).

The small LM grows trees as a draft head does (:mod:`fsd_infer.drafters.growth`), or draws a chain.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsd_core import functional
from fsd_core.errors import ModelLoadError, VocabularyMismatchError
from fsd_core.functional import at_nodes, is_host
from fsd_core.tensors import padded, to_device
from fsd_infer.drafters.base import DRAFTERS
from fsd_infer.drafters.frontier import Frontier
from fsd_infer.drafters.growth import CachedSession
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.drafters.tree_drafter import TreeDrafter
from fsd_infer.targets.stack import StackOwner
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import LARGEST_OF_LM, MENU, TreeShape
from fsd_infer.trees.tree import DraftTree


@cache
def warn_context(name: str, limit: int) -> None:
    """Warn once per small LM that a text is too long for it.

    Args:
        name: name of the small LM.
        limit: length of its context, in tokens.
    """
    warnings.warn(
        f"drafter {name} has a context of {limit} tokens and drafts nothing beyond, but the text is longer. Use a "
        "small model with a longer context, or a draft head.",
        stacklevel=2,
    )


@DRAFTERS.register("lm")
class LMDrafter(TreeDrafter):
    """A small LM that drafts a tree, or above temperature 0 a chain that is drawn from q, if the rule takes one.

    Its q is near the target's p, so most tokens of a drawn chain are accepted: it takes fewer nodes than a tree and
    emits more tokens. A wider shape that the user names is kept.

    A chain is as deep as the tree would be. It ends earlier where the small LM's probability of the whole chain falls
    below ``stop_below``, or where ``tree="auto"`` ends it. Both depend on the past and the drafts so far only, so no
    rule's distribution changes (:mod:`fsd_infer.trees.policy`).

    Drafting ends where the small LM's context ends, with one warning. In a batch it goes on while any row is within the
    context. The nodes of longer rows then have no q, so gates stay closed there.

    Args:
        model: the small LM.
        target: the model to draft for.
        shape: see :class:`TreeDrafter`. :meth:`TreeShape.chain` drafts chains at temperature 0 too.

    Raises:
        VocabularyMismatchError: the tokenizers differ, or, without tokenizers, the widths of the logits.
        ModelLoadError: the small LM has recurrent layers.
    """

    name = "lm"
    model: Target
    drafts_beams = True
    largest = LARGEST_OF_LM
    all_shapes = MENU[1:]  # a recorded round reads the text in any case

    def __init__(self, model: Target, target: Target, shape: TreeShape | None = None) -> None:
        vocabulary = self._fit(model, target)
        if model.is_recurrent:
            raise ModelLoadError(
                f"{model.name} has recurrent layers, which verify trees here and do not grow them: draft with a small "
                "model without such layers, or with a head."
            )
        super().__init__(target, model, vocabulary, shape)
        ours, theirs = (sum(p.numel() for p in part.model.parameters()) for part in (model, target))
        self.relative_cost = min(ours / max(theirs, 1), 2.0)

    @property
    def draws_chains(self) -> bool:  # type: ignore[override]
        return self.has_default_shape or self.bounds is not None or self.shape.width == 1

    def _fit(self, model: Target, target: Target) -> int:
        """Return the number of entries of the drafter's distributions, or raise if the small LM does not fit."""
        check_same_vocabulary(model, target)
        return target.vocab_size

    def clamp_ids(self, tokens: Tensor) -> Tensor:
        """Replace ids [B, M] that the small LM lacks, those of the target's special tokens, by its last id."""
        size = self.model.vocab_size
        return tokens if size >= self.vocabulary else tokens.clamp_max(size - 1)

    def to_draft_vocabulary(self, logits: Tensor) -> Tensor:
        """Return the small LM's logits [..., W] as those of the drafter's vocabulary."""
        missing = self.vocabulary - logits.shape[-1]  # one model's may be padded where the other's are not
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[..., : self.vocabulary]

    def start(self, first_tokens: Tensor, request: DraftRequest) -> LMSession:
        return LMSession(self, first_tokens, request)

    def modules(self) -> list[nn.Module]:
        return [self.model.model]

    def stack_owners(self) -> list[StackOwner]:
        return [self.model]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "model": self.model.name}


class LMSession(CachedSession):
    """A session that keeps the texts, because the small LM reads tokens instead of features.

    The accepted path often runs through expanded nodes. On a CPU their keys and values are moved to their final slots.
    On other devices it is cheaper to read these tokens again than to find the nodes.

    Attributes:
        text: [B, S] token ids.
        cached: [B] tokens of each text that the KV cache holds.
    """

    drafter: LMDrafter
    per_row = CachedSession.per_row | {"text", "cached"}

    def __init__(self, drafter: LMDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        super().__init__(drafter, request)
        self.text = torch.zeros(request.batch, request.cache_slots + 1, dtype=torch.long, device=self.device)
        self.text[:, 0] = to_device(first_tokens, self.device)
        self.lengths += 1
        self.cached = torch.zeros_like(self.lengths)
        self._max_unread = 1  # a bound of any text's tokens that are not in the cache
        self._moves_nodes = is_host(self.device)  # whether accepted nodes' keys and values move to their final slots
        # [B][E] tokens and parents of each depth's expanded nodes, if these move
        self._expanded: list[tuple[list[list[int]], list[list[int]]]] = []
        self._row_depths: Tensor | None = None  # [B] to which each row can be drafted; None: none is near its end

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        positions = self.lengths[:, None] + torch.arange(tokens.shape[1], device=self.device)
        self.text.scatter_(1, positions, tokens)  # padding is overwritten by the next tokens
        if self._moves_nodes:
            self._move_accepted(tokens, counts)
        self.lengths += counts
        torch.minimum(self.cached, self.lengths - 1, out=self.cached)  # draft() reads the root
        self._max_unread += tokens.shape[1]
        hardly_drafts = self.prices is not None and self.prices.was_plain and not (self.growth and self.growth.drafted)
        if self._unread() - 1 > self.drafter.max_depth + 1 and not hardly_drafts:
            self._read(self.lengths - 1, self._unread() - 1)  # a prompt, whose time is not a draft's

    @property
    def is_recordable(self) -> bool:
        return self.shape.prices is None

    def tensors(self) -> list[Tensor]:
        return [self.lengths, self.text, self.cached]

    def restart(self, fresh: LMSession) -> None:
        self._max_unread = fresh._max_unread

    def _move_accepted(self, tokens: Tensor, counts: Tensor) -> None:
        """Move keys and values of the expanded nodes on the path of the new tokens [B, K] to their final slots."""
        final = self.lengths[:, None] + torch.arange(tokens.shape[1])
        slots = final.clone()
        for row, (text, count) in enumerate(zip(tokens.tolist(), counts.tolist())):
            path = self._expanded_path(row, text[:count])
            slots[row, : len(path)] = self.lengths[row] + torch.tensor(path, dtype=torch.long)
            self.cached[row] += len(path)
        self._expanded = []
        if not torch.equal(slots, final):
            self.cache.move(slots, final)

    def _expanded_path(self, row: int, text: list[int]) -> list[int]:
        """Return the expanded nodes on the path of ``text``, by their order in the cache after a row's text."""
        path, first, node = list[int](), 0, 0
        for token, (tokens, parents) in zip(text, self._expanded):
            nodes = list(zip(tokens[row], parents[row]))
            if (token, node) not in nodes:
                break
            node = nodes.index((token, node))
            path.append(first + node)
            first += len(nodes)
        return path

    def _unread(self) -> int:
        """Return the number of uncached tokens of the text with the most, or a bound on it."""
        bound = max(self._max_unread, self.drafter.max_depth + 2)  # the same in every round
        return functional.host_max(self.lengths - self.cached, bound)

    def _max_depth(self) -> int:
        """Return the largest depth that fits the small LM's context in any row, and note the depth of each row."""
        model, depth = self.drafter.model, min(self.shape.depth, self.drafter.max_depth)
        limit, longest = model.max_positions, functional.host_max(self.lengths, self.text.shape[1])
        self._row_depths = None
        if limit is None or longest + depth <= limit + 1:  # + 1: the last draft is not read
            return depth
        if is_host(self.device) or self.request.max_length + depth > limit + 1:
            warn_context(model.name, limit)
        self._row_depths = (limit + 1 - self.lengths).clamp_max(depth)
        return functional.host_max(self._row_depths, depth)

    def _read_roots(self) -> tuple[Tensor, Tensor | None]:
        return self._read(self.lengths, self._unread()), None

    def _select_nodes(self, tree: DraftTree) -> DraftTree:
        tree = super()._select_nodes(tree)
        if self._row_depths is not None:  # q is unknown beyond the small LM's context
            tree.q_index = tree.q_index.masked_fill(tree.depths >= self._row_depths[:, None], -1)
        return tree

    def _read(self, ends: Tensor, count: int) -> Tensor:
        """Read the last ``count`` tokens of the texts up to ``ends`` [B]. Return the logits [B, 1, V] at the last."""
        # Rows with fewer unread tokens read some again. Tokens beyond `ends` are padding.
        starts = (ends - count).clamp_min(0)
        slots, visible = self.cache.in_text(starts, count)
        lasts = ends - 1 - starts  # [B] index of each row's last token among the count
        keep = functional.host_max(count - lasts, count)  # the others' logits take time, and those of a prompt memory
        logits = self._forward(self.text.gather(1, slots), slots, visible, keep if keep < count else 0)
        self.cached.copy_(ends)
        self._max_unread = 1
        return at_nodes(logits, (lasts - (count - keep))[:, None])

    def _read_nodes(self, tokens: Tensor, parents: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        if self._moves_nodes:
            self._expanded.append((tokens.tolist(), parents.tolist()))
        if any(self.drafter.model.layer_windows.values()):  # windows go by positions, which differ from slots
            self._add_node_positions(positions, visible.shape[-1])
        return self._forward(tokens, positions, visible)

    def _can_grow(self, frontier: Frontier, row: int, node: int) -> bool:
        model = self.drafter.model
        if model.max_positions is None or frontier.lengths[row] + len(frontier.path(row, node)) <= model.max_positions:
            return True
        warn_context(model.name, model.max_positions)
        return False

    def _read_frontier(self, frontier: Frontier, nodes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        if bool((self.cached < self.lengths).any()):
            self._read_roots()
        unread = self._uncached(frontier, nodes)
        _, tokens, positions, visible = frontier.forward_inputs(self.cache, self.lengths - 1, unread)
        logits = self._forward(tokens, positions, visible)
        indices = [[read.index(node) for node in of_row] for of_row, read in zip(nodes, unread, strict=True)]
        return at_nodes(logits, to_device(padded(indices).long(), self.device)), None

    def follow_beams(self, frontier: Frontier, nodes: Sequence[Sequence[int]], grown: Sequence[int]) -> None:
        super().follow_beams(frontier, nodes, grown)
        if any(grown):
            self.cached.copy_(self.lengths)

    def _forward(self, tokens: Tensor, positions: Tensor, visible: Tensor, keep: int = 0) -> Tensor:
        drafter, model = self.drafter, self.drafter.model
        if model.max_positions is not None:  # draft() drops the output beyond
            positions = positions.clamp_max(model.max_positions - 1)
        return drafter.to_draft_vocabulary(
            model.forward(drafter.clamp_ids(tokens), positions, visible, self.cache, keep)[0]
        )


def check_same_vocabulary(drafter: Any, target: Any) -> None:
    """Raise VocabularyMismatchError unless every token id means the same to both models.

    Each model, for decoding or in training, has a name, a tokenizer or None, and ``vocab_size``.
    """
    if drafter.tokenizer is not None and target.tokenizer is not None:
        ours, theirs = drafter.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        # Special tokens that one side adds are harmless: their ids are never drafted, or never accepted.
        shared = ours.keys() & theirs.keys()
        if all(ours[t] == theirs[t] for t in shared) and len(shared) >= 0.99 * max(len(ours), len(theirs)):
            return
        reason = f"only {sum(ours[t] == theirs[t] for t in shared)} of {len(theirs)} tokens have the same id in both"
    elif drafter.vocab_size == target.vocab_size:
        return
    else:
        reason = f"their logits have {drafter.vocab_size} and {target.vocab_size} entries"
    raise VocabularyMismatchError(
        f"drafter {drafter.name} and target {target.name} do not share a vocabulary ({reason}). Use a drafter of the "
        "same family, or train a draft head for this target with fsd-train."
    )


def load_lm(drafter: str | Path, target: Target) -> Target:
    """Load a small LM in the target's dtype and on its device.

    Args:
        drafter: directory, Hub id or built-in name of a causal LM, or the directory of a LoRA adapter, which is merged
            into its base model.
        target: the model to draft for.

    Raises:
        ModelLoadError: no such model, or one that transformers cannot load.
        CheckpointError: a damaged file.
    """
    return Target.from_pretrained(str(drafter), dtype=target.dtype, device=target.device)
