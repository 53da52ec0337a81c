"""Draft dynamic trees with an EAGLE-style draft head. :mod:`fsd_infer.drafters.growth` grows them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsd_core.functional import at_nodes, is_host
from fsd_core.tensors import to_device
from fsd_infer.device.cache import SlotCache
from fsd_infer.drafters.base import DRAFTERS, Drafter
from fsd_infer.drafters.frontier import Frontier
from fsd_infer.drafters.growth import CachedSession
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.drafters.tree_drafter import TreeDrafter
from fsd_infer.drafters.vocabulary import ContextVocabulary
from fsd_infer.heads.head import EagleHead, HeadModel
from fsd_infer.heads.hub import find_head
from fsd_infer.targets.precision import PLAIN
from fsd_infer.targets.stack import HeadStep, Stack, StackOwner
from fsd_infer.targets.target import Target
from fsd_infer.targets.weights import format_of
from fsd_infer.trees.shape import TreeShape

PREFILL_CHUNK = 256  # tokens of all rows per forward over prompts; more are not faster and take memory
MAX_STEP_UNREAD = 16  # tokens of a text that are read as one step, with logits
MAX_UNREAD = 1024  # tokens of a text that may wait while drafting is paused


@DRAFTERS.register("eagle")
class EagleDrafter(TreeDrafter):
    """A draft head (:class:`EagleHead`). It shares the target's embeddings and LM head unless it has its own.

    Args:
        head: the trained head.
        target: the model whose features the head reads.
        shape: see :class:`TreeDrafter`.
        context_ids: whether the ids of each text extend a reduced draft vocabulary (:class:`ContextVocabulary`). A head
            with its own LM head has no rows for them and drafts its vocabulary only.

    Attributes:
        trained_for: precision of the target's weights in training, if this target has another; else None.
        public: whether the head is stored in the layout of EAGLE's authors. Then only its sizes show that it fits the
            target, so records note it.
    """

    name = "eagle"
    model: HeadModel
    drafts_beams = reads_features = True
    public = False
    trained_for: str | None = None

    def __init__(
        self, head: EagleHead, target: Target, shape: TreeShape | None = None, context_ids: bool = True
    ) -> None:
        target.check_lm_head()
        target.capture_layers(head.config.fused_layers)
        self.head = head.to(target.device).cast(target.dtype).eval()
        super().__init__(target, HeadModel(head, target), head.config.draft_vocab_size or target.vocab_size, shape)
        self._drafted = bytearray(target.vocab_size)  # whether an id is in the head's vocabulary
        self.draft_ids = ids = head.draft_ids
        for drafted in [] if ids is None else ids.tolist():
            self._drafted[drafted] = True
        self.lm_head = None if ids is None or head.lm_head is not None else target.reduced_lm_head(ids)
        self.context_ids = context_ids and self.lm_head is not None
        self._fused_step: HeadStep | None = None  # the backend's step, from ids and features to logits
        self._step_stack: Stack | None = None  # the stack that gave it

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
        return None if find_head(name) is None else cls.from_pretrained(name, target, tree)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, target: Target, shape: TreeShape | None = None, **hub: Any
    ) -> EagleDrafter:
        """Load a head from a directory or the Hub.

        Args:
            source: directory or Hub id.
            target: the model whose features the head reads.
            shape: see :class:`TreeDrafter`.
            hub: options of :meth:`EagleHead.from_pretrained`, such as ``revision``.

        Raises:
            FsdError: as for :meth:`EagleHead.from_pretrained`.
        """
        result = cls(EagleHead.from_pretrained(source, target, dtype=target.dtype, **hub), target, shape)
        result.public = "model_type" not in (result.head.config.target or {})
        result.directory = Path(result.head.name_or_path)
        if not result.public:
            result.check_precision((result.head.config.target or {}).get("precision", ""))
        return result

    def check_precision(self, trained_for: str) -> None:
        """Warn, and note for records, if the head was trained for target weights of another precision.

        Args:
            trained_for: precision as in :attr:`Target.precision`.
        """
        if trained_for != self.target.precision:
            self.trained_for = trained_for or PLAIN
            warnings.warn(
                f"the head was trained for {self.trained_for}, and {self.target.name} has "
                f"{self.target.precision or PLAIN}. Measure the loss of acceptance with `fsd-train doctor`.",
                stacklevel=3,
            )

    def start(self, first_tokens: Tensor, request: DraftRequest) -> EagleSession:
        return EagleSession(self, request)

    def context_vocabulary(self, batch: int) -> ContextVocabulary | None:
        """Return the drafter's vocabulary for a new batch; None if it is always the head's own."""
        if not self.context_ids:
            return None
        assert self.draft_ids is not None and self.lm_head is not None
        return ContextVocabulary(self.target, self.draft_ids, self.lm_head, self._drafted, batch)

    def q_logits(self, outputs: Tensor, vocabulary: ContextVocabulary | None) -> Tensor:
        """Compute draft logits.

        Args:
            outputs: [B, E, H] outputs of the head.
            vocabulary: vocabulary of the batch, from :meth:`context_vocabulary`.

        Returns:
            [B, E, Vd] logits in the target's dtype.
        """
        read = self.head.readout(outputs)
        if self.head.lm_head is not None:
            logits: Tensor = self.head.lm_head(read)
            return logits
        if vocabulary is not None:
            return vocabulary.logits(read)
        return self.target.lm_logits(read, self.lm_head)

    def step(
        self,
        cache: SlotCache,
        visible: Tensor,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        vocabulary: ContextVocabulary | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the head on [B, E] tokens, as :meth:`HeadModel.forward`, and return its outputs and :meth:`q_logits`."""
        if self.head.stack is not self._step_stack:  # a backend has changed it
            self._step_stack, self._fused_step = self.head.stack, self._find_fused_step()
        extra_rows = None if vocabulary is None else vocabulary.extra_rows
        fused = self._fused_step and self._fused_step(cache, visible, tokens, features, positions, extra_rows)
        if fused:
            outputs, logits = fused
            return outputs, logits if vocabulary is None else vocabulary.masked(logits)
        outputs = self.model.forward(cache, visible, tokens, features, positions)
        return outputs, self.q_logits(outputs, vocabulary)

    def _find_fused_step(self) -> HeadStep | None:
        head, model = self.head, self.target.model
        if head.lm_head is None and self.target.logit_form is not None:
            return None
        lm_head = head.lm_head or self.lm_head or model.get_output_embeddings()
        return head.stack.head_step(head, head.embed_tokens or model.get_input_embeddings(), lm_head)

    def describe(self) -> dict[str, Any]:
        narrow = any(format_of(part) == "fp8" for module in self.modules() for part in module.modules())
        notes = {"weights": "fp8" if narrow else None, "public": self.public or None, "trained_for": self.trained_for}
        described = {**super().describe(), "draft_vocab_size": self.vocabulary, "context_ids": self.context_ids}
        return described | {name: value for name, value in notes.items() if value is not None}

    def modules(self) -> list[nn.Module]:
        return [self.head] if self.lm_head is None else [self.head, self.lm_head]

    def stack_owners(self) -> list[StackOwner]:
        return [self.head]


class EagleSession(CachedSession):
    """A session whose cache slot i holds the pair of token i+1 and feature i. ``lengths`` counts a row's pairs.

    Attributes:
        root_output: [B, H] the head's output at each root.
        unread: arguments of earlier calls of :meth:`extend`, which the next draft reads.
    """

    drafter: EagleDrafter
    per_row = CachedSession.per_row | {"root_output", "_outputs"}
    max_step_unread = MAX_STEP_UNREAD

    def __init__(self, drafter: EagleDrafter, request: DraftRequest) -> None:
        super().__init__(drafter, request)
        self.vocabulary = drafter.context_vocabulary(request.batch)
        self.unread: list[tuple[Tensor, Tensor, Tensor]] = []
        target, width = drafter.target, drafter.head.config.hidden_size
        self.root_output = torch.zeros(request.batch, width, dtype=target.dtype, device=self.device)
        self._has_read_prompt = False  # whether the prompt is read
        # [B, N, H] at nodes of beams, in this round
        self._outputs = self.root_output.new_zeros(request.batch, 0, width)
        self._features: Tensor  # [B, E, H] the head's outputs at the nodes that were expanded last
        if target.places_images and drafter.head.turns_as_target:
            self.cache.offsets = torch.zeros_like(self.lengths)

    def set_rotary(self, prompts: Tensor, offsets: Tensor) -> None:
        if self.cache.offsets is not None:
            self.cache.prompt_offsets = prompts
            self.cache.offsets.copy_(offsets)

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        self.unread.append((tokens, features, counts))
        # New tokens wait for the next draft, which reads them with the root; prompts and recorded rounds do not wait.
        waiting = sum(part[0].shape[1] for part in self.unread)
        if not self._has_read_prompt or self._reads_at_once or waiting > MAX_UNREAD:
            self._read_text()

    def _read_text(self) -> Tensor | None:
        """Read the tokens that wait. Return logits [B, 1, Vd] at the roots if this computed them."""
        if not self.unread:
            return None
        tokens, features, counts = _concatenated(self.unread)  # [B, K], [B, K, F], [B]
        self.unread = []
        features = self.drafter.target.features_of(features, self.drafter.head.config.fused_layers)
        if self._has_read_prompt and not self._reads_at_once and tokens.shape[1] <= self.max_step_unread:
            slots, visible = self.cache.in_text(self.lengths, tokens.shape[1])
            outputs, logits = self.drafter.step(self.cache, visible, tokens, features, slots, self.vocabulary)
        else:
            chunk = max(PREFILL_CHUNK // tokens.shape[0], 1)
            chunks = zip(tokens.split(chunk, 1), features.split(chunk, 1), strict=True)
            outputs = torch.cat([self._read(number * chunk, *inputs) for number, inputs in enumerate(chunks)], 1)
            logits = None
        has_new, last_new = counts > 0, (counts - 1).clamp_min(0)[:, None]
        root_output = at_nodes(outputs, last_new)[:, 0]
        self.root_output.copy_(torch.where(has_new[:, None], root_output, self.root_output))  # else it stays
        self.lengths += counts
        self._has_read_prompt, self.cache.prompt_offsets = True, None
        return None if logits is None else at_nodes(logits, last_new)

    def _read(self, first: int, tokens: Tensor, features: Tensor) -> Tensor:
        """Return the head's outputs over tokens [B, K] with features [B, K, F], the ``first``-th new ones onwards."""
        count = tokens.shape[1]
        used = None if self._has_read_prompt else first + count  # a prompt begins at slot 0
        slots, visible = self.cache.in_text(self.lengths + first, count, used)
        return self.drafter.model.forward(self.cache, visible, tokens, features, slots)

    @property
    def needs_report(self) -> bool:
        return super().needs_report or self.vocabulary is not None

    @property
    def is_recordable(self) -> bool:
        return self.shape.prices is None and (self.vocabulary is None or self.vocabulary.is_recordable)

    @property
    def _reads_at_once(self) -> bool:
        """Whether accepted tokens are read at the end of their round, which may be recorded, not by the next draft."""
        return self.is_recordable and (self.vocabulary is None or not is_host(self.device))

    def host_inputs(self) -> list[Tensor]:
        return [] if self.vocabulary is None else [self.vocabulary.host_inputs()]

    def set_host_inputs(self, inputs: Iterator[Tensor] | None) -> None:
        if self.vocabulary is not None:
            self.vocabulary.set_host_inputs(None if inputs is None else next(inputs))

    def tensors(self) -> list[Tensor]:
        return [self.lengths, self.root_output, *([] if self.cache.offsets is None else [self.cache.offsets])]

    def restart(self, fresh: EagleSession) -> None:
        self._has_read_prompt, self.vocabulary = fresh._has_read_prompt, fresh.vocabulary

    def extend_on_host(self, rows: Sequence[Sequence[int]]) -> None:
        if self.vocabulary is not None:
            self.vocabulary.extend(rows)

    def _read_roots(self) -> tuple[Tensor, Tensor | None]:
        logits = self._read_text()
        self._features = self.root_output[:, None]
        ids = self.drafter.draft_ids if self.vocabulary is None else self.vocabulary.ids
        return self.drafter.q_logits(self._features, self.vocabulary) if logits is None else logits, ids

    def keep_rows(self, rows: Tensor) -> None:
        super().keep_rows(rows)
        if self.vocabulary is not None:
            self.vocabulary.keep_rows(rows)
        index = to_device(rows, self.device)
        self.unread = [(tokens[index], features[index], counts[index]) for tokens, features, counts in self.unread]

    def _read_nodes(self, tokens: Tensor, parents: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        before = at_nodes(self._features, parents)
        self._features, logits = self.drafter.step(self.cache, visible, tokens, before, positions, self.vocabulary)
        return logits

    def _read_frontier(self, frontier: Frontier, nodes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Read each node with the feature before it: the target's if it has read that node, else the estimate."""
        unread = self._uncached(frontier, nodes)
        missing = 1 + max(map(len, frontier.tokens)) - self._outputs.shape[1]
        self._outputs = torch.nn.functional.pad(self._outputs, (0, 0, 0, missing))
        for final in (True, False):
            chosen = [[x for x in new if self._is_final(frontier, row, x) is final] for row, new in enumerate(unread)]
            if any(chosen):
                self._read_part(frontier, chosen, final)
        logits = self.drafter.q_logits(at_nodes(self._outputs, frontier.padded_nodes(nodes)), self.vocabulary)
        return logits, self.drafter.draft_ids if self.vocabulary is None else self.vocabulary.ids

    def _read_part(self, frontier: Frontier, nodes: Sequence[Sequence[int]], final: bool) -> None:
        if self.vocabulary is not None:
            self.vocabulary.extend([[tokens[node] for node in row] for tokens, row in zip(frontier.tokens, nodes)])
        numbers, tokens, positions, visible = frontier.forward_inputs(self.cache, self.lengths - 1, nodes)
        parents = [[parents[node] for node in row] for parents, row in zip(frontier.parents, nodes)]
        before = frontier.padded_nodes(parents)
        if final:
            features = at_nodes(frontier.features, before.clamp_max(frontier.features.shape[1] - 1))
            features = self.drafter.target.features_of(features, self.drafter.head.config.fused_layers)
        else:
            features = at_nodes(self._outputs, before)
        outputs = self.drafter.model.forward(self.cache, visible, tokens, features, positions)
        self._outputs = self._outputs.scatter(1, numbers[..., None].expand_as(outputs), outputs)

    def _is_final(self, frontier: Frontier, row: int, node: int) -> bool:
        return frontier.parents[row][node] < frontier.read[row]

    def follow_beams(self, frontier: Frontier, nodes: Sequence[Sequence[int]], grown: Sequence[int]) -> None:
        super().follow_beams(frontier, nodes, grown)
        self._outputs = self._outputs[:, :0]


def _concatenated(parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Join the arguments of several calls of :meth:`EagleSession.extend` into those of one call."""
    if len(parts) == 1:
        return parts[0]
    tokens, features = (torch.cat(column, 1) for column in list(zip(*parts))[:2])
    real = torch.cat([torch.arange(x.shape[1], device=x.device) < counts[:, None] for x, _, counts in parts], 1)
    counts = real.sum(1)
    order = real.sort(dim=1, descending=True, stable=True).indices[:, : int(counts.max())]  # real tokens first
    return tokens.gather(1, order), at_nodes(features, order), counts
