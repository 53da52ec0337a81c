"""Sizes, settings and memory for the training of a head, from its target's config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fsd_bench.estimate import planned_head
from fsd_bench.planned import EXPERTS, ModelSizes, count_weights, planned_target, sizes_of
from fsd_bench.roofline import MemoryItem
from fsd_core.text.image_rows import has_row_images
from fsd_core.text.row_check import RowCheck
from fsd_core.text.rows import read_rows
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.target import Target
from fsd_train.losses.rows import default_chunk_size
from fsd_train.repository import find

SMALL = 1024  # largest hidden size for training on a CPU, where the LM head dominates the cost of drafts
COVERAGE = 0.99
DRAFT_VOCABULARIES = (4096, 8192, 16000, 32000)
HUGE = 128_000  # vocabulary beyond which a head never drafts over all of it: its LM head would dominate every step
ACTIVATION_BUDGET = 13.1e9
LIBRARIES = 0.7e9  # bytes of torch, transformers, Lightning and oneDNN's buffers in a process on a CPU
TOKENS_PER_STEP = 16384
GPUS = (24, 48, 80)  # GB
LARGEST = GPUS[-1]


@dataclass(frozen=True)
class TrainingFacts(ModelSizes):
    """The sizes of a target that determine its recipe, and the target itself, without values."""

    target: Target = field(kw_only=True)

    @property
    def layout(self) -> str:
        """Layout of its head: EAGLE-3, which other engines run, or our own for small targets."""
        return "fsd" if self.hidden_size <= SMALL else "eagle3"

    @property
    def scaled_norm(self) -> bool:
        """Whether the final norm has a weight under the name that the head reads."""
        return getattr(getattr(self.target.decoder, "norm", None), "weight", None) is not None

    @property
    def experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return any(getattr(self.target.config, key, None) for key in EXPERTS)

    def head(self, drafted: int | None) -> EagleHead:
        """Plan its head of one layer, without values."""
        return planned_head(self.target, layout=self.layout, draft_vocab_size=drafted)


def feature_bytes(head: EagleHead) -> int:
    """Return the bytes of a token's cached features: final ones and those of fused layers."""
    return 2 * head.config.target_hidden_size * (1 + len(set(head.config.fused_layers)))


@dataclass(frozen=True)
class Choices:
    """Settings of a recipe, see :func:`choose`."""

    max_length: int
    batch_tokens: int
    accumulate: int
    unroll_steps: int
    draft_vocab_size: int | None
    lr: float
    max_steps: int
    coverage: float | None = None
    tokenizer: bool = False


def facts_of(name: str) -> TrainingFacts:
    """Read the facts of a target from its config, without weights.

    Raises:
        ModelLoadError: the target is missing, is no decoder-only language model, or has layers that cannot verify a
            draft tree.
        UnknownNameError: see :func:`fsd_infer.targets.loading.resolve_target`.
    """
    target = planned_target(name)
    return TrainingFacts(**vars(sizes_of(target)), target=target)


def choose(facts: TrainingFacts) -> Choices:
    """Choose settings by size: those of EAGLE, SpecForge and speculators for large targets, our own for small ones."""
    small = facts.hidden_size <= SMALL
    max_length = min(512 if small else 2048, facts.positions or 2048)
    unroll_steps = 3 if small else 5
    batch_tokens = 2048
    while not small and batch_tokens < TOKENS_PER_STEP:
        if _activation_bytes(facts) * 2 * batch_tokens * unroll_steps > ACTIVATION_BUDGET:
            break
        batch_tokens *= 2
    if facts.vocab_size <= 16384:
        vocabulary = None
    elif small:
        vocabulary = 8192
    elif facts.hidden_size <= 2048:
        vocabulary = 16000 if facts.vocab_size <= 65536 else 32000
    else:
        vocabulary = None if facts.vocab_size <= 40000 else 32000
    choices = Choices(
        max_length=max_length,
        batch_tokens=batch_tokens,
        accumulate=1,
        unroll_steps=unroll_steps,
        draft_vocab_size=vocabulary,
        lr=1e-3 if small else 3e-4 if facts.hidden_size <= 2048 else 1e-4,
        max_steps=2500 if small else 20000,
    )
    if small:
        return choices
    smaller = replace(choices, batch_tokens=max(batch_tokens // 2, 2048))
    if not _fits(facts, choices, LARGEST) and _fits(facts, smaller, LARGEST):
        choices = smaller
    return replace(choices, accumulate=TOKENS_PER_STEP // choices.batch_tokens)


def _fits(facts: TrainingFacts, choices: Choices, gigabytes: int) -> bool:
    return 1.1 * sum(part.bytes for part in memory(facts, choices)) <= gigabytes * 1e9


def covering_vocabulary(counts: Tensor) -> tuple[int | None, float]:
    """Choose the smallest of ``DRAFT_VOCABULARIES`` that covers 99 % of the answers' tokens.

    Args:
        counts: [V] occurrences in the answers.

    Returns:
        (size, covered share). If none is enough, the largest for V > 128,000, else None for the whole vocabulary.
    """
    ranked = counts.sort(descending=True).values.double()
    total = max(float(ranked.sum()), 1.0)
    shares = {size: float(ranked[:size].sum()) / total for size in DRAFT_VOCABULARIES if size < len(counts)}
    sufficient = [size for size, share in shares.items() if share >= COVERAGE]
    if not sufficient and len(counts) > HUGE:
        sufficient = [DRAFT_VOCABULARIES[-1]]
    return (sufficient[0], shares[sufficient[0]]) if sufficient else (None, 1.0)


def _is_text(files: Sequence[str]) -> bool:
    """Whether any row is text or has images, which a tokenizer must read. Stops at the first such row."""
    rows = (row.values for path in files for row in read_rows(find(path), RowCheck()))
    ids = ("prompt_ids", "response_ids")
    return any(has_row_images(row) or all(row.get(name) is None for name in ids) for row in rows)


def fit_to_data(facts: TrainingFacts, choices: Choices, files: Sequence[str]) -> Choices:
    """Fit draft vocabulary and length to the training answers.

    Raises DataError for malformed rows and token ids outside the target's vocabulary.
    """
    from fsd_train.data import AnswersDataModule

    options: dict[str, Any] = {"validation_fraction": 0.0, "max_length": facts.positions or 4 * choices.max_length}
    tokenizer = _is_text(files)
    data = AnswersDataModule(list(files), tokenizer=facts.name if tokenizer else None, **options)
    data.setup()
    assert data.train_set is not None
    lengths = sorted(data.train_set.lengths)
    percentile = lengths[int(0.99 * (len(lengths) - 1))]
    size, share = covering_vocabulary(data.answer_counts(facts.vocab_size))
    return replace(
        choices,
        draft_vocab_size=size,
        coverage=share,
        tokenizer=tokenizer,
        max_length=min(choices.max_length, -(-percentile // 64) * 64, facts.positions or choices.max_length),
    )


def _activation_bytes(facts: TrainingFacts) -> int:
    """Return the bytes that backward keeps of a token in a run of the head: 36 H + 9 A + 8 I.

    A is the width of queries, keys and values. Counted under bf16 autocast on layers of Qwen3-0.6B, Gemma-3-1B and
    Llama-3.2-1B, which keep 0.96 to 1.03 times as much.
    """
    attention = (facts.heads + 2 * facts.kv_heads) * facts.head_dim
    return 36 * facts.hidden_size + 9 * attention + 8 * facts.intermediate_size


def memory(facts: TrainingFacts, choices: Choices) -> list[MemoryItem]:
    """Return the parts of a device's memory, with the target in the step."""
    batch = BatchSize(choices.batch_tokens, choices.max_length, choices.unroll_steps)
    device = "cpu" if facts.hidden_size <= SMALL else "cuda"
    return step_memory(facts, facts.head(choices.draft_vocab_size), batch, device)


@dataclass(frozen=True)
class BatchSize:
    """Size of a training batch.

    Attributes:
        tokens: tokens of the packed sequence.
        length: tokens of a row.
        steps: runs of the head. The first is over all tokens.
        answered: tokens of answers, which the later runs are over. None: all.
    """

    tokens: int
    length: int
    steps: int
    answered: int | None = None


def step_memory(
    facts: TrainingFacts, head: EagleHead, batch: BatchSize, device: str, cached: bool = False
) -> list[MemoryItem]:
    """Return the parts of the memory of a training step under bf16 autocast.

    Args:
        facts: facts of the target.
        head: the head, with or without values.
        batch: its size.
        device: device type. On CUDA, FlexAttention's block masks take no memory worth counting; elsewhere each step's
            dense mask is kept. A CPU also holds the libraries, a checkpoint while it is written, and gaps in its heap,
            which were half of the activations in runs with rows of 8,192 tokens.
        cached: whether features are cached, so that only the target's embeddings and LM head are loaded.
    """
    model, weights, drafted = facts.target.model, count_weights(head), head.config.draft_vocab_size or facts.vocab_size
    tables = {id(part.weight): part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    loaded = sum(weight.numel() for weight in tables.values()) if cached else facts.parameters
    h, chunk, tokens, steps = facts.hidden_size, default_chunk_size(device, drafted), batch.tokens, batch.steps
    width, answered = _activation_bytes(facts), tokens if batch.answered is None else batch.answered
    states = f"18 B x {count_text(weights)} (fp32 weights, gradients, 2 moments; bf16 copy)"
    activations, how = float(width * (tokens + (steps - 1) * answered)), f"{width} B x {tokens} tokens x {steps} steps"
    if answered < tokens:
        how = f"{width} B x ({tokens} + {steps - 1} x {answered}) tokens"
    rows = MemoryItem("target's rows", 2.0 * drafted * h, f"2 B x {drafted} x {h}")
    parts = [
        MemoryItem("target", 2.0 * loaded, f"2 B x {count_text(loaded)} weights (bf16)", shared=True),
        MemoryItem("head", 18.0 * weights, states, shared=True),
        *([rows] if drafted < facts.vocab_size else []),
        MemoryItem("activations", activations, how),
        MemoryItem("logits", 1.3 * 4 * chunk * drafted, f"1.3 x 4 B x {chunk} rows x {drafted}"),
    ]
    if device != "cuda":
        masks = (steps - 1) * (steps + 2)
        how = f"{masks} B x {batch.length} x {answered} tokens"
        parts.append(MemoryItem("masks", float(masks * batch.length * answered), how))
    if device == "cpu":
        parts.append(MemoryItem("heap gaps", 0.5 * activations, "0.5 x activations, freed but kept"))
        parts.append(MemoryItem("checkpoint", 12.0 * weights, f"12 B x {count_text(weights)}, while it is written"))
        parts.append(MemoryItem("libraries", LIBRARIES, "torch, transformers, Lightning"))
    return parts


def hardware(facts: TrainingFacts, choices: Choices) -> str:
    """Name the smallest hardware for a recipe, with a tenth of the memory to spare."""
    if facts.hidden_size <= SMALL and _fits(facts, choices, 4):
        return "two CPU cores and 4 GB of memory, or any GPU"
    for size in GPUS:
        if _fits(facts, choices, size):
            return f"one {size} GB GPU"
    return f"several {LARGEST} GB GPUs with --trainer.strategy fsdp"


def count_text(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:  # "1 G", not "1e+03 M"
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"
