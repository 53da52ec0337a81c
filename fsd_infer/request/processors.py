"""The request's logits processors, applied to every node of a draft tree as ``generate`` would at that context."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    TopKLogitsWarper,
)

from fsd_infer.cpu import ops
from fsd_infer.device.transfer import to_device
from fsd_infer.divergence import expand_draft
from fsd_infer.errors import FsdError
from fsd_infer.tree import DraftTree

# Processors that look at the scores alone: one call serves all nodes. Any other is given each node's own context.
_CONTEXT_FREE = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "LogitNormalization",
}
# Those of transformers that look at the text too, and at nothing else. Its others keep a state that follows one text,
# or run a model of their own. What a user brings must be a function of text and scores.
_OF_TEXT = {
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
}


class TreeProcessors:
    """Applies a ``LogitsProcessorList`` to trees.

    Args:
        processors: as ``generate`` prepares them (may be empty).
        batch: rows of the request.

    Raises:
        FsdError: for a processor with a state of its own, which cannot look at a tree.
    """

    def __init__(self, processors: LogitsProcessorList | None, batch: int = 1) -> None:
        self.batch = batch
        self.processors: list[Any] = list(processors or [])
        names = [type(p).__name__ for p in self.processors]
        for processor, name in zip(self.processors, names, strict=True):
            if _theirs(processor) and name not in _CONTEXT_FREE | _OF_TEXT:
                raise FsdError(
                    f"{name} cannot be applied to a draft tree: it keeps a state that follows one text, or runs a "
                    "model of its own. Leave it out."
                )
        self.contextual = any(name not in _CONTEXT_FREE for name in names)
        self._free = [p for p, name in zip(self.processors, names, strict=True) if name in _CONTEXT_FREE]

    def __bool__(self) -> bool:
        return len(self.processors) > 0

    def context_free(self, logits: Tensor) -> Tensor:
        """[..., V] -> [..., V] through the context-free processors only (for sampling drafts)."""
        flat = logits.reshape(-1, logits.shape[-1])
        return _processed(self._free, _no_context(flat), flat.clone()).view_as(logits)

    def nodes(self, logits: Tensor, tree: DraftTree, texts: list[Tensor], rows: Sequence[int]) -> Tensor:
        """Processed scores of the target at every node.

        Args:
            logits: [B, N, V] raw, fp32.
            tree: the tree.
            texts: per row the token ids before the root, [T_b], as ``generate`` would pass them to processors, but on
                the CPU.
            rows: which row of the request each of them is.

        Returns:
            [B, N, V]; ``logits`` itself if there are no processors.
        """
        if not self.processors:
            return logits
        if not self.contextual:
            return self.context_free(logits)
        scores = torch.empty_like(logits)
        for row, (text, asked, *nodes) in enumerate(zip(texts, rows, *tree.nodes, strict=True)):
            for level, paths in _levels(*nodes):
                context = torch.cat([text.expand(len(level), -1), torch.tensor(paths)], 1)
                index = to_device(torch.tensor(level), logits.device)
                scores[row, index] = self.texts(logits[row, index], to_device(context, logits.device), asked)
        return scores

    def texts(self, scores: Tensor, texts: Tensor, row: int) -> Tensor:
        """Processed scores [M, V] of texts [M, T] that all go on from one row of the request."""
        return _processed([self._of_row(p, row, len(texts)) for p in self.processors], texts, scores)

    def drafts(self, tree: DraftTree, vocab_size: int, texts: list[Tensor], rows: Sequence[int]) -> Tensor:
        """Processed scores of the drafter at the inner nodes, [B, I, V]; -inf outside the draft vocabulary."""
        q_logits = expand_draft(tree.q_logits.float(), tree.draft_ids, vocab_size)
        if not self.contextual:
            return self.context_free(q_logits) if self.processors else q_logits
        # every node borrows its q (or zeros), is processed in its context, and the inner ones are taken back
        own = tree.q_index.clamp_min(0)[..., None].expand(-1, -1, vocab_size)
        processed = self.nodes(q_logits.gather(1, own), tree, texts, rows)
        count = q_logits.shape[1]
        place = torch.where(tree.q_index >= 0, tree.q_index, count)[..., None].expand_as(processed)
        return torch.nn.functional.pad(q_logits, (0, 0, 0, 1)).scatter(1, place, processed)[:, :count]

    def _of_row(self, processor: Any, row: int, count: int) -> Any:
        """A processor for ``count`` contexts of one row of the request, which it would take for as many rows."""
        if isinstance(processor, PrefixConstrainedLogitsProcessor):
            allowed = processor._prefix_allowed_tokens_fn
            return PrefixConstrainedLogitsProcessor(lambda _, text: allowed(row, text), num_beams=1)
        if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):  # its prompts may have several answers each
            processor, prompts = copy.copy(processor), processor.encoder_input_ids
            processor.encoder_input_ids = prompts[row * len(prompts) // self.batch].expand(count, -1)
        elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
            processor, prompts = copy.copy(processor), processor.generated_ngrams
            processor.batch_size, processor.generated_ngrams = 1, [prompts[row * len(prompts) // self.batch]]
        elif isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):  # of a repetition penalty: padding
            processor, padding = copy.copy(processor), processor.prompt_ignore_length
            processor.prompt_ignore_length = padding[row * len(padding) // self.batch].expand(count)
        return processor


def _levels(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[list[int], list[list[int]]]]:
    """A tree's nodes by depth, and the tokens on the way to each of them, its own included."""
    paths: list[list[int]] = []
    levels: list[tuple[list[int], list[list[int]]]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        paths.append([*paths[parent], token] if node else [token])
        if len(paths[node]) > len(levels):
            levels.append(([], []))
        level, ways = levels[len(paths[node]) - 1]
        level.append(node)
        ways.append(paths[node])
    return levels


def _theirs(processor: Any) -> bool:
    """Whether it is one of transformers' own."""
    return type(processor).__module__.partition(".")[0] == "transformers"


def _processed(processors: Sequence[Any], texts: Tensor, scores: Tensor) -> Tensor:
    """scores [M, V] of the texts [M, T] through all processors. Raises FsdError where one of transformers' fails."""
    for processor in processors:
        try:
            if type(processor) is TopKLogitsWarper:  # transformers' default, and slow on a CPU
                scores = ops.keep_largest(scores, min(processor.top_k, scores.shape[-1]), processor.filter_value)
            else:
                scores = processor(texts, scores)
        except Exception as error:
            if not _theirs(processor) or isinstance(error, FsdError):
                raise
            raise FsdError(
                f"{type(processor).__name__} fails, so its option has a value of no sense: {error}"
            ) from error
    return scores


def _no_context(scores: Tensor) -> Tensor:
    return torch.zeros(scores.shape[0], 1, dtype=torch.long, device=scores.device)
