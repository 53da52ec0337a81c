"""Drafting chains with an independent small causal LM of the same vocabulary (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import warnings
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fsd_infer.device.cuda_graphs import Recorder
from fsd_infer.device.transfer import to_device
from fsd_infer.drafters.base import DRAFTERS, Drafter, DraftRequest, DraftSession
from fsd_infer.drafters.shape import TreeShape, check_stop_below, check_tree, not_believed, of_device
from fsd_infer.drafters.visits import tilted
from fsd_infer.errors import VocabularyMismatchError
from fsd_infer.targets.target import Target
from fsd_infer.tree import DraftTree, at_nodes, visible_slots

# (depth, stop_below): on a CPU a chain that is not believed in costs more than it brings; a GPU would have to be waited
# for after every draft.
DEFAULT_CHAINS = {"cpu": (5, 0.3), "cuda": (5, 0.0)}
TILTED_CHAINS = {"cpu": (8, 0.3), "cuda": (8, 0.0)}  # under laws that favour drafts


def chain_of(tree: TreeShape | None, target: Target) -> tuple[int, float]:
    """Depth and ``stop_below`` of a chain where ``tree`` is wanted; by default those of the target's device."""
    return of_device(DEFAULT_CHAINS, target.device) if tree is None else (tree.depth, tree.stop_below)


@cache
def warn_context(name: str, limit: int) -> None:
    """Says once per small model that a text is too long for it."""
    warnings.warn(
        f"drafter {name} has a context of {limit} tokens, shorter than the text: from there on it drafts nothing. Use "
        "a small model with a longer context, or a head.",
        stacklevel=2,
    )


@DRAFTERS.register("lm")
class LMDrafter(Drafter):
    """A chain of ``depth`` tokens per round: sampled from q at temperature > 0, argmax (one-hot q) at 0.

    Where the small model's own context ends, drafting does, with one warning. In a batch the chain goes on as long as
    any row is within it; the other rows' nodes are then without q, so that no gate opens there.

    Args:
        model: the small model.
        target: the model it drafts for.
        depth: most drafts per round.
        stop_below: draft no further where the small model gives the chain drafted so far less than this chance, each
            step tilted as the law will be (in a batch: every row's); 0: always ``depth``. A function of the context
            alone, so no rule's law changes. The check waits for the device once per draft.

    Attributes:
        by_default: nobody asked for these; laws that favour drafts get :data:`TILTED_CHAINS` in their place.

    Raises:
        FsdError: depth or stop_below out of range.
        VocabularyMismatchError: the tokenizers differ (or, without tokenizers, the widths of the logits).
    """

    name = "lm"
    target: Target

    def __init__(self, model: Target, target: Target, depth: int = 5, stop_below: float = 0.0) -> None:
        check_tree("the chain", depth, 2)
        check_stop_below(stop_below)
        check_same_vocabulary(model, target)
        self.model = model
        self.depth = depth
        self.stop_below = stop_below
        self.vocab_size = target.vocab_size
        self.by_default = False

    def for_batch(self, batch: int, tilt: float = 0.0) -> Drafter:
        if not (self.by_default and tilt):
            return self
        made = copy(self)
        made.depth, made.stop_below = of_device(TILTED_CHAINS, self.model.device)
        return made

    @property
    def max_nodes(self) -> int:
        return self.depth + 1

    @property
    def max_depth(self) -> int:
        return self.depth

    def start(self, first_tokens: Tensor, request: DraftRequest) -> LMSession:
        return LMSession(self, first_tokens, request)

    def slots(self, longest: int) -> int:
        """Slots for texts of up to ``longest`` tokens and for a chain after them."""
        return longest + self.depth + 1

    def cache_bytes(self, batch: int, slots: int) -> int:
        return self.model.cache_bytes(batch, self.slots(slots))

    @property
    def held_bytes(self) -> int:
        return self.model.held_bytes

    def use_graphs(self, recorder: Recorder) -> None:
        self.model.use_graphs(recorder)

    def modules(self) -> list[nn.Module]:
        return [self.model.model]

    def describe(self) -> dict[str, Any]:
        stop = {"stop_below": self.stop_below} if self.stop_below else {}
        return {**super().describe(), "model": self.model.name, **stop}


class LMSession(DraftSession):
    """``lengths`` counts the text, its last token included; ``cached`` what the small model has read of it.

    Both, and the text, are on the CPU.
    """

    def __init__(self, drafter: LMDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        self.drafter, self.request = drafter, request
        batch, self.device = request.batch, drafter.model.device
        self.cache = drafter.model.new_cache(batch, drafter.slots(request.slots))
        self.text = torch.zeros(batch, request.slots + 1, dtype=torch.long)
        self.text[:, 0] = first_tokens
        self.lengths = torch.ones(batch, dtype=torch.long)
        self.cached = torch.zeros_like(self.lengths)
        self.chain: DraftTree | None = None  # the last one, until the text has grown
        self.agreed: Tensor | None = None  # [B] drafts of it that the text went on with; None: all that were accepted

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        offsets = torch.arange(tokens.shape[1])
        rows, columns = torch.nonzero(offsets < counts[:, None], as_tuple=True)
        self.text[rows, self.lengths[rows] + columns] = tokens[rows, columns]
        # Of the drafts, the model has read all but the last, and accepted ones lie in their final slots already.
        read = 0 if self.chain is None else max(self.chain.tokens.shape[1] - 2, 0)
        kept = counts - 1 if self.agreed is None else torch.minimum(counts - 1, self.agreed)
        self.cached = self.cached + kept.clamp(0, read)
        self.lengths = self.lengths + counts
        self.cached = torch.minimum(self.cached, self.lengths - 1)  # the root is always read again
        self.chain = self.agreed = None

    def observe(self, tree: DraftTree, logits: Tensor, path: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        """Another drafter's tokens, grafted on, may have led the text away from the chain."""
        if self.chain is None or self.chain.rows is None:  # nobody asked for its nodes: it was verified as it is
            return
        drafts = torch.tensor([row.tokens[1:] for row in self.chain.rows])
        depth = min(drafts.shape[1], tokens.shape[1])
        self.agreed = (drafts[:, :depth] == tokens[:, :depth]).cumprod(1).sum(1)

    def draft(self, roots: Tensor) -> DraftTree:
        drafter, request = self.drafter, self.request
        reach = self._reach()
        depth, common = int(reach.max()), int(reach.min())
        if depth < 1:
            return DraftTree.root_only(to_device(roots, self.device), drafter.vocab_size)
        new = int((self.lengths - self.cached).max())
        offsets = torch.arange(new)
        slots = self.cached[:, None] + offsets  # rows with less to read write padding after their text
        unread = self.text.gather(1, slots.clamp_max(self.text.shape[1] - 1))
        lasts = self.lengths - self.cached - 1
        # A few tokens pass the recorded forward, with logits of all; of a whole prompt they would fill the memory.
        skipped = int(lasts.min()) if new > drafter.depth + 2 else 0
        logits = self._run(to_device(unread, self.device), slots, new - skipped if skipped else 0)
        logits = at_nodes(logits, to_device(lasts - skipped, self.device)[:, None])[:, 0]
        tokens, q_logits, q_scores = [to_device(roots, self.device)], [], []
        path_scores = [torch.zeros(roots.shape[0], device=self.device)]  # cumulative log q
        visits = path_scores[0]  # tilted
        for step in range(1, depth + 1):
            scores = logits if request.process is None else request.process(logits)
            if request.greedy:
                token = logits.argmax(-1)
            else:
                token = _sampled(scores, request.generator)
            tokens.append(token)
            q_logits.append(logits)
            q_scores.append(scores)
            log_q = logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(-1)
            path_scores.append(path_scores[-1] + log_q)
            visits = visits + tilted(log_q[:, None], request.tilt)[:, 0]
            if step == depth or not_believed(visits[:, None], drafter.stop_below):
                break
            logits = self._run(token[:, None], (self.lengths + step - 1)[:, None])[:, 0]
        self.cached = self.lengths.clone()
        self.chain = DraftTree.chain(
            torch.stack(tokens, 1),
            torch.stack(q_logits, 1),
            q_scores=None if request.greedy else torch.stack(q_scores, 1),
            scores=torch.stack(path_scores, 1),
        )
        if common < len(tokens) - 1:
            beyond = to_device(torch.arange(len(tokens)) >= reach[:, None], self.device)
            self.chain.q_index = self.chain.q_index.masked_fill(beyond, -1)
        return self.chain

    def _reach(self) -> Tensor:
        """[B] how many tokens can be drafted for each row: ``depth``, or fewer where the small model's context ends."""
        drafter = self.drafter
        limit = drafter.model.max_positions
        reach = torch.full_like(self.lengths, drafter.depth)
        if limit is not None and int(self.lengths.max()) + drafter.depth > limit + 1:  # the last draft is not read
            warn_context(drafter.model.name, limit)
            reach = reach.minimum(limit + 1 - self.lengths)
        return reach

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.text, self.lengths, self.cached = self.text[rows], self.lengths[rows], self.cached[rows]
        self.agreed = None if self.agreed is None else self.agreed[rows]

    def _run(self, tokens: Tensor, slots: Tensor, keep: int = 0) -> Tensor:
        """Causal forward over tokens [B, M] written to consecutive slots [B, M] (on the CPU).

        Returns:
            logits [B, keep, V] of the last ``keep`` tokens (0: of all M), fp32
        """
        count = tokens.shape[1]
        first, used = int(slots[0, 0]), int(slots.max()) + 1
        causal = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
        visible = visible_slots(slots[:, 0], causal.expand(slots.shape[0], -1, -1))
        slots = to_device(slots, self.device)
        self.cache.set_write_slots(slots, first if slots.shape[0] == 1 else None, used)
        model = self.drafter.model
        limit = model.max_positions
        positions = slots if limit is None else slots.clamp_max(limit - 1)  # beyond, what comes out is not used
        logits, _ = model.forward(tokens, positions, visible, self.cache, keep)
        return self._fit(logits.float())

    def _fit(self, logits: Tensor) -> Tensor:
        """Cut or pad (with -inf) the rows that padding added to one model's vocabulary but not to the other's."""
        width = self.drafter.vocab_size
        if logits.shape[-1] >= width:
            return logits[..., :width]
        return torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))


def _sampled(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    """[B, V] -> [B], as torch.multinomial draws from their softmax, whose look at its input waits for the device."""
    chances = scores.softmax(-1)
    return (chances / torch.empty_like(chances).exponential_(generator=generator)).argmax(-1)


class HasVocabulary(Protocol):
    """A model with a vocabulary, loaded or in training."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def vocab_size(self) -> int: ...


def check_same_vocabulary(drafter: HasVocabulary, target: HasVocabulary) -> None:
    """Raise VocabularyMismatchError unless both models mean the same by every token id."""
    if drafter.tokenizer is not None and target.tokenizer is not None:
        ours, theirs = drafter.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        # added special tokens on one side only are harmless: such ids are never drafted, or never accepted
        shared = ours.keys() & theirs.keys()
        if all(ours[t] == theirs[t] for t in shared) and len(shared) >= 0.99 * max(len(ours), len(theirs)):
            return
        reason = f"only {sum(ours[t] == theirs[t] for t in shared)} of {len(theirs)} tokens have the same id in both"
    elif drafter.vocab_size == target.vocab_size:
        return
    else:
        reason = f"their logits have {drafter.vocab_size} and {target.vocab_size} entries"
    raise VocabularyMismatchError(
        f"drafter {drafter.name} and target {target.name} do not share a vocabulary ({reason}): use a drafter of the "
        "same family, or train a head for this target with fsd-train."
    )


def load_lm(drafter: str | Path, target: Target) -> Target:
    """The small model that ``drafter`` names, in the target's dtype and on its device.

    Args:
        drafter: a causal LM's directory, hub id or built-in name, or the directory of a LoRA adapter for one, which is
            merged into it.
        target: what it is to draft for.

    Raises:
        ModelLoadError, CheckpointError: each names the thing and how to fix it.
    """
    return Target.from_pretrained(str(drafter), dtype=target.dtype, device=target.device)
