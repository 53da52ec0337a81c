"""The request's logits processors, applied at every node of a draft tree as ``generate`` applies them to its text."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
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

from fsd_core import functional
from fsd_core.divergence import expand_draft
from fsd_core.errors import FsdError, foreign_errors
from fsd_core.tensors import to_device
from fsd_infer.request.guide import GuideProcessor
from fsd_infer.trees.tree import DraftTree

Texts = Sequence[Tensor | None]  # per row the token ids before the root; None: the row emits nothing
# Processors that read only the scores: one call serves all nodes. Any other gets each node's own context.
_CONTEXT_FREE = frozenset(
    """
    TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper TopHLogitsWarper MinPLogitsWarper TypicalLogitsWarper
    EpsilonLogitsWarper EtaLogitsWarper SuppressTokensLogitsProcessor LogitNormalization
    """.split()
)
_OF_IDS = {"SuppressTokensLogitsProcessor"}  # a reduced vocabulary has other ids
# Processors of transformers that read text and scores, and nothing else. Its other ones keep a state that follows one
# text, or run a model of their own. A processor of the user's must be a function of text and scores.
_OF_TEXT = frozenset(
    """
    MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor RepetitionPenaltyLogitsProcessor
    EncoderRepetitionPenaltyLogitsProcessor NoRepeatNGramLogitsProcessor EncoderNoRepeatNGramLogitsProcessor
    SequenceBiasLogitsProcessor NoBadWordsLogitsProcessor PrefixConstrainedLogitsProcessor ForcedBOSTokenLogitsProcessor
    ForcedEOSTokenLogitsProcessor InfNanRemoveLogitsProcessor ExponentialDecayLengthPenalty
    SuppressTokensAtBeginLogitsProcessor WatermarkLogitsProcessor
    """.split()
)


def temperature_of(processors: LogitsProcessorList | None) -> float:
    """Return the temperature among the processors; 1 if there is none."""
    return next((float(warper.temperature) for warper in processors or [] if hasattr(warper, "temperature")), 1.0)


class TreeProcessors:
    """Applies a ``LogitsProcessorList`` to trees.

    Args:
        processors: as ``generate`` prepares them; may be empty.
        batch: number of rows of the request.

    Raises:
        FsdError: a processor with a state of its own, which cannot follow the paths of a tree.
    """

    def __init__(self, processors: LogitsProcessorList | None, batch: int = 1) -> None:
        self.batch = batch
        self.processors: list[Any] = list(processors or [])
        names = [type(p).__name__ for p in self.processors]
        for processor, name in zip(self.processors, names, strict=True):
            if _is_transformers_own(processor) and name not in _CONTEXT_FREE | _OF_TEXT:
                raise FsdError(
                    f"{name} cannot be applied to a draft tree: it keeps a state that follows one text, or runs a "
                    "model of its own. Leave it out."
                )
        self.is_needed = bool(self.processors)
        self.contextual = any(name not in _CONTEXT_FREE for name in names)
        self._free = [p for p, name in zip(self.processors, names, strict=True) if name in _CONTEXT_FREE]

    @property
    def signature(self) -> Hashable:
        """Key of the processors that recorded rounds hold: all, unless one looks at texts (then those of drafts).

        A processor's values are numbers and tensors; another object is only equal to itself.
        """
        recorded = self._free if self.contextual else self.processors
        return self.contextual, tuple((type(processor), *_values(vars(processor))) for processor in recorded)

    def process_context_free(self, logits: Tensor) -> Tensor:
        """Process scores [..., V] by the context-free processors only."""
        return _context_free(self._free, logits)

    def process_draft_logits(self, logits: Tensor) -> Tensor:
        """Process a drafter's logits [..., Vd] by what depends neither on the text nor on ids, to draw drafts."""
        free = [p for p in self._free if type(p).__name__ not in _OF_IDS]
        return _context_free(free, logits)

    def process_nodes(self, logits: Tensor, tree: DraftTree, texts: Texts, rows: Sequence[int]) -> Tensor:
        """Return the target's processed scores at every node.

        Args:
            logits: [B, N, V] raw, fp32.
            tree: the tree.
            texts: per row the token ids before the root, [T_b], as ``generate`` passes them to processors, but on the
                CPU. None: the row emits nothing, and processors of texts leave its scores as they are.
            rows: number of each row in the request.

        Returns:
            [B, N, V]; ``logits`` itself if there are no processors.
        """
        scores = logits
        for processor in self.processors:
            if type(processor).__name__ in _CONTEXT_FREE:
                scores = _context_free([processor], scores)
            elif isinstance(processor, GuideProcessor):
                scores = processor.mask_nodes(scores, tree.nodes, texts, rows)
            else:
                scores = self._by_depth(processor, scores, tree, texts, rows)
        return scores

    def _by_depth(self, processor: Any, scores: Tensor, tree: DraftTree, texts: Texts, rows: Sequence[int]) -> Tensor:
        """Apply one processor at every node, depth by depth, since it takes texts of one length."""
        result = torch.empty_like(scores)
        for row, (text, request_row, *nodes) in enumerate(zip(texts, rows, *tree.nodes, strict=True)):
            if text is None:
                result[row] = scores[row]
                continue
            for of_depth, paths in _nodes_by_depth(*nodes):
                context = torch.cat([text.expand(len(of_depth), -1), torch.tensor(paths)], 1)
                index = to_device(torch.tensor(of_depth), scores.device)
                of_row = [self._of_row(processor, request_row, len(of_depth))]
                result[row, index] = _processed(of_row, to_device(context, scores.device), scores[row, index])
        return result

    def process_texts(self, scores: Tensor, texts: Tensor, row: int) -> Tensor:
        """Process scores [M, V] of texts [M, T] that all continue one row of the request."""
        return _processed([self._of_row(p, row, len(texts)) for p in self.processors], texts, scores)

    def process_drafts(self, tree: DraftTree, vocab_size: int, texts: Texts, rows: Sequence[int]) -> Tensor:
        """Return the drafter's processed scores at nodes with q, [B, I, V]; -inf outside the draft vocabulary."""
        q_logits = expand_draft(tree.q_logits.float(), tree.draft_ids, vocab_size)
        if not self.contextual:
            return self.process_context_free(q_logits) if self.processors else q_logits
        # processors take scores at every node: nodes without q borrow any, and only those with q are read back
        borrowed = tree.q_index.clamp_min(0)[..., None].expand(-1, -1, vocab_size)
        processed = self.process_nodes(q_logits.gather(1, borrowed), tree, texts, rows)
        count = q_logits.shape[1]
        q_row = torch.where(tree.q_index >= 0, tree.q_index, count)[..., None].expand_as(processed)
        return torch.nn.functional.pad(q_logits, (0, 0, 0, 1)).scatter(1, q_row, processed)[:, :count]

    def _of_row(self, processor: Any, row: int, count: int) -> Any:
        """The processor for ``count`` contexts of one row, which it would otherwise take for separate rows."""
        if isinstance(processor, PrefixConstrainedLogitsProcessor):
            allowed = processor._prefix_allowed_tokens_fn
            return PrefixConstrainedLogitsProcessor(lambda _, text: allowed(row, text), num_beams=1)
        if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):  # a prompt may have several answers
            processor, prompts = copy.copy(processor), processor.encoder_input_ids
            processor.encoder_input_ids = prompts[row * len(prompts) // self.batch].expand(count, -1)
        elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
            processor, prompts = copy.copy(processor), processor.generated_ngrams
            processor.batch_size, processor.generated_ngrams = 1, [prompts[row * len(prompts) // self.batch]]
        elif isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):  # a repetition penalty skips padding
            processor, padding = copy.copy(processor), processor.prompt_ignore_length
            processor.prompt_ignore_length = padding[row * len(padding) // self.batch].expand(count)
        return processor


def _nodes_by_depth(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[list[int], list[list[int]]]]:
    """A tree's nodes by depth, and the tokens on the path to each of them, its own included."""
    paths: list[list[int]] = []
    by_depth: dict[int, list[int]] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        paths.append([*paths[parent], token] if node else [token])
        by_depth.setdefault(len(paths[node]), []).append(node)
    return [(of_depth, [paths[node] for node in of_depth]) for of_depth in by_depth.values()]


def _values(options: Mapping[str, Any]) -> Iterator[Hashable]:
    for name, value in sorted(options.items()):
        if isinstance(value, Tensor):  # read once per request
            yield name, value.dtype, value.shape, tuple(value.flatten().tolist())
        else:
            yield name, value if isinstance(value, Hashable) else id(value)


def _is_transformers_own(processor: Any) -> bool:
    """Whether the processor is one of transformers' own."""
    return type(processor).__module__.partition(".")[0] == "transformers"


def _processed(processors: Sequence[Any], texts: Tensor, scores: Tensor) -> Tensor:
    """scores [M, V] of texts [M, T] through all processors.

    Raises FsdError if one of transformers' own fails, or another returns no scores of each text.
    """
    for processor in processors:
        if type(processor) is TopKLogitsWarper:  # transformers' default, and slow on a CPU
            scores = functional.keep_top_k(scores, min(processor.top_k, scores.shape[-1]), processor.filter_value)
        elif _is_transformers_own(processor):
            fault = f"{type(processor).__name__} fails, so its option has an invalid value: {{why}}"
            with foreign_errors(FsdError, fault):
                scores = processor(texts, scores)
        else:
            scores = _checked(processor, processor(texts, scores), scores)
    return scores


def _checked(processor: Any, result: Any, scores: Tensor) -> Tensor:
    """Return the scores that a processor made of ``scores`` [M, V]. Raises FsdError for another shape.

    In ``generate`` a processor may always get one text. Here it gets one for each node of a depth.
    """
    if isinstance(result, Tensor) and result.shape == scores.shape:
        return result.to(scores)
    shape = f"{list(result.shape)}" if isinstance(result, Tensor) else f"{result!r:.40}"
    name = getattr(processor, "__name__", type(processor).__name__)
    raise FsdError(
        f"the logits processor {name} made {shape} of scores {list(scores.shape)}: it returns scores of the shape that "
        "it gets, a row per text."
    )


def _context_free(processors: Sequence[Any], scores: Tensor) -> Tensor:
    """scores [..., V] through processors that look at no text."""
    flat = scores.reshape(-1, scores.shape[-1])
    no_text = torch.zeros(flat.shape[0], 1, dtype=torch.long, device=scores.device)
    return _processed(processors, no_text, flat.clone()).view_as(scores)
