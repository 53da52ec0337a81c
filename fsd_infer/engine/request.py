"""The input of the decoding loop, and its rounds as observers see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from fsd_infer.engine.callback import Callback
from fsd_infer.engine.report import RoundReport
from fsd_infer.rules.verification import Emission
from fsd_infer.targets.image_inputs import ImageInput


@dataclass(frozen=True)
class Round:
    """A round's tree, logits and emitted tokens. N nodes, the root first; D the depth of the tree.

    Attributes:
        nodes: [N] tokens.
        parents: [N] index of each node's parent; the root's is 0.
        proposers: [N] index of the proposer that drafted the node.
        q_index: [N] each node's row of ``q_logits``; -1 if the drafter gave no distribution.
        q_logits: [I, Vd] the drafter's raw logits.
        draft_ids: [Vd] target id of each drafter vocabulary entry; None if Vd = V.
        logits: [N, V] the target's raw logits after each node. On a device the next round may write over these and over
            ``q_logits``: copy what you keep.
        path: [D+1] the accepted nodes, the root first, padded with the last.
        emissions: the emitted tokens; token j follows ``path[j]``.
        seconds: time of the round by phase; the first round has ``prefill``.
    """

    nodes: list[int]
    parents: list[int]
    proposers: list[int]
    q_index: list[int]
    q_logits: Tensor
    draft_ids: Tensor | None
    logits: Tensor
    path: list[int]
    emissions: Sequence[Emission]
    seconds: dict[str, float]

    @classmethod
    def of(cls, report: RoundReport, row: int) -> Round:
        """Return one batch row of a round. Syncs with the device."""
        tree, verdict = report.tensors.tree, report.verdict
        real = tree.is_draft[row].clone()
        real[0] = True  # the root
        proposers = torch.zeros_like(tree.parents) if tree.proposers is None else tree.proposers
        columns = (tree.tokens, tree.parents, proposers, tree.q_index)
        nodes, parents, proposed_by, q_index = (column[row][real].tolist() for column in columns)
        path, q_logits, draft_ids = verdict.path[row].tolist(), tree.q_logits[row], tree.draft_ids
        logits, emissions = report.tensors.logits[row], report.emissions[row]
        return cls(nodes, parents, proposed_by, q_index, q_logits, draft_ids, logits, path, emissions, report.seconds)

    @property
    def tokens(self) -> list[int]:
        """The emitted tokens."""
        return [emission.token for emission in self.emissions]


@dataclass
class Request:
    """One batch to decode, as ``generate`` would prepare it.

    Attributes:
        prompts: token ids per row, without padding, none empty.
        max_new_tokens: most tokens per answer.
        greedy: temperature 0.
        processors: prepared logits processors, temperature included.
        criteria: prepared stopping criteria other than EOS and length. They receive only the text; ``scores`` is None.
        eos_token_ids: tokens that end an answer.
        generator: random generator of the draws; None: torch's global generator.
        image_inputs: per prompt its images, or None; None: no prompt has any.
        padded_prompts: the prompts for processors and criteria, left-padded; None: without padding.
        measure_log_likelihood: record the target's log-probability of each emitted token.
        users: per prompt, its owner in the prefix cache; None: one owner for all.
        max_cache_bytes: most bytes of the KV caches; None: the free memory.
        callbacks: that watch it, see :class:`.Callback`.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    greedy: bool = True
    processors: LogitsProcessorList | None = None
    criteria: StoppingCriteriaList | None = None
    eos_token_ids: frozenset[int] = frozenset()
    generator: torch.Generator | None = None
    image_inputs: Sequence[ImageInput | None] | None = None
    padded_prompts: list[list[int]] | None = None
    measure_log_likelihood: bool = False
    users: Sequence[str] | None = None
    max_cache_bytes: int | None = None
    callbacks: Sequence[Callback] = ()

    @property
    def prefix_keys(self) -> list[list[int]]:
        """The prompts as keys of the prefix cache: digests of images stand in place of their placeholders."""
        image_inputs = self.image_inputs or [None] * len(self.prompts)
        return [
            prompt if image_input is None else image_input.prefix_key(prompt)
            for prompt, image_input in zip(self.prompts, image_inputs)
        ]

    @property
    def texts(self) -> list[list[int]]:
        """The prompts as processors and criteria see them."""
        return self.padded_prompts or self.prompts
