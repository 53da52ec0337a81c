"""What a target's config says of training a head for it: sizes, settings by size, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fsd_bench.planned import Sizes, planned_target, sizes_of
from fsd_bench.roofline import Part
from fsd_infer.errors import DataError
from fsd_infer.heads.config import usual_layers
from fsd_infer.targets.target import Target
from fsd_train.losses.rows import default_chunk_size

SMALL = 1024  # hidden size up to which a target is trained on a CPU, where the LM head dominates the cost of drafting
COVERAGE = 0.99
DRAFT_VOCABULARIES = (4096, 8192, 16000, 32000)
# bytes that backward keeps per token and run of the head: 2·(20 H + 4 I), counted on a Llama layer under bf16 autocast
ACTIVATION_BUDGET = 12e9
TOKENS_PER_STEP = 16384
GPUS = (24, 48, 80)  # GB
LARGEST = GPUS[-1]


@dataclass(frozen=True)
class TargetFacts(Sizes):
    """What a recipe depends on; ``name`` is how the target is asked for.

    Attributes:
        scaled_norm: whether it has a final norm with a weight under the name the head reads.
        experts: whether it is a mixture of experts.
    """

    scaled_norm: bool = True
    experts: bool = False

    @property
    def layout(self) -> str:
        """Of its head: EAGLE-3, which other engines run, or for a target that is trained on a CPU our own."""
        return "fsd" if self.hidden_size <= SMALL else "eagle3"

    def head_parameters(self, drafted: int) -> int:
        """Weights of a head of one gated decoder layer: projection, attention, MLP.

        Layout "eagle3" fuses three layers, its attention reads twice the width, and its LM head of ``drafted`` ids is
        its own.
        """
        h, eagle3 = self.hidden_size, self.layout == "eagle3"
        queries, keys = h * self.head_dim * self.heads, h * self.head_dim * self.kv_heads
        attention = 3 * queries + 4 * keys if eagle3 else 2 * queries + 2 * keys
        own = h * drafted if eagle3 else 0
        return (3 if eagle3 else 2) * h * h + attention + 3 * h * self.intermediate_size + own

    @property
    def feature_bytes(self) -> int:
        """Of a token's cached features."""
        return 2 * self.hidden_size * (1 + (len(usual_layers(self.layers)) if self.layout == "eagle3" else 0))


@dataclass(frozen=True)
class Choices:
    """What a recipe sets, see :func:`choose`."""

    max_length: int
    batch_tokens: int
    accumulate: int
    unroll_steps: int
    draft_vocab_size: int | None
    lr: float
    max_steps: int
    coverage: float | None = None
    tokenizer: bool = False


def facts_of(target: str | Target) -> TargetFacts:
    """The facts of a target, by name from its config alone: no weights are read.

    Raises:
        ModelLoadError: it cannot be found, is no decoder-only language model, or has layers that token trees cannot be
            verified through.
        UnknownNameError: see :func:`fsd_infer.targets.loading.resolve_target`.
    """
    if isinstance(target, str):
        target = planned_target(target)
    experts = any(getattr(target.config, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    scaled_norm = getattr(getattr(target.decoder, "norm", None), "weight", None) is not None
    return TargetFacts(**vars(sizes_of(target)), scaled_norm=scaled_norm, experts=experts)


def choose(facts: TargetFacts) -> Choices:
    """Settings by size: what EAGLE, SpecForge and speculators use for large targets, our own for small ones."""
    small = facts.hidden_size <= SMALL
    max_length = min(512 if small else 2048, facts.positions or 2048)
    unroll_steps = 3 if small else 5
    batch_tokens = 2048
    while not small and batch_tokens < TOKENS_PER_STEP:
        if activation_bytes(facts, 2 * batch_tokens, unroll_steps) > ACTIVATION_BUDGET:
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


def _fits(facts: TargetFacts, choices: Choices, gigabytes: int) -> bool:
    return 1.1 * sum(part.bytes for part in memory(facts, choices)) <= gigabytes * 1e9


def covering_vocabulary(counts: Tensor) -> tuple[int | None, float]:
    """The smallest of ``DRAFT_VOCABULARIES`` that holds 99 % of the answers' tokens, and the share that it holds.

    Args:
        counts: [V] occurrences in the answers.

    Returns:
        (size, share); size None, the whole vocabulary, where none of them is enough or smaller than V.
    """
    ranked = counts.sort(descending=True).values.double()
    total = float(ranked.sum())
    for size in DRAFT_VOCABULARIES:
        if size < len(counts) and total and float(ranked[:size].sum()) >= COVERAGE * total:
            return size, float(ranked[:size].sum()) / total
    return None, 1.0


def fit_to_data(facts: TargetFacts, choices: Choices, files: Sequence[str]) -> Choices:
    """Draft vocabulary and length after the answers that will be trained on.

    Raises DataError on malformed rows and on token ids that the target lacks.
    """
    from fsd_train.data import AnswersDataModule

    longest = min(facts.positions or 2048, 4 * choices.max_length)
    options: dict[str, Any] = {"validation_fraction": 0.0, "max_length": longest, "vocab_size": facts.vocab_size}
    tokenizer: str | None = None
    data = AnswersDataModule(list(files), **options)
    try:
        data.setup()
    except DataError:  # rows of text
        tokenizer = facts.name
        data = AnswersDataModule(list(files), tokenizer=tokenizer, **options)
        data.setup()
    assert data.train_set is not None
    lengths = sorted(data.train_set.lengths)
    usual = lengths[int(0.99 * (len(lengths) - 1))]
    size, share = covering_vocabulary(data.answer_counts(facts.vocab_size))
    return replace(
        choices,
        draft_vocab_size=size,
        coverage=share,
        tokenizer=tokenizer is not None,
        max_length=min(choices.max_length, -(-usual // 64) * 64, facts.positions or choices.max_length),
    )


def activation_bytes(facts: TargetFacts, tokens: int, steps: int) -> float:
    """What backward keeps, about: 2 B · (20 H + 4 I) · tokens · steps."""
    return 2.0 * (20 * facts.hidden_size + 4 * facts.intermediate_size) * tokens * steps


def memory(facts: TargetFacts, choices: Choices) -> list[Part]:
    """What fills a device's memory, with the target in the step."""
    drafted = choices.draft_vocab_size or facts.vocab_size
    device = "cpu" if facts.hidden_size <= SMALL else "cuda"
    weights = facts.head_parameters(drafted)
    return step_memory(facts, facts.parameters, weights, drafted, choices.batch_tokens, choices.unroll_steps, device)


def step_memory(
    facts: TargetFacts, loaded: int, weights: int, drafted: int, tokens: int, steps: int, device: str
) -> list[Part]:
    """What a training step holds under bf16 autocast.

    Args:
        facts: of the target.
        loaded: weights of the target in memory; of embeddings and LM head alone where features are cached.
        weights: of the head.
        drafted: size of the draft vocabulary.
        tokens, steps: of a batch, and runs of the head over it.
        device: its type.
    """
    h, chunk = facts.hidden_size, default_chunk_size(device, drafted)
    head = f"18 B x {count_text(weights)} (fp32 weights, gradients, 2 moments; bf16 copy)"
    kept = f"2 B x (20 x {h} + 4 x {facts.intermediate_size}) x {tokens} tokens x {steps} steps"
    rows = Part("target's rows", 2.0 * drafted * h, f"2 B x {drafted} x {h}")
    return [
        Part("target", 2.0 * loaded, f"2 B x {count_text(loaded)} weights (bf16)", shared=True),
        Part("head", 18.0 * weights, head, shared=True),
        *([rows] if drafted < facts.vocab_size else []),
        Part("activations", activation_bytes(facts, tokens, steps), kept),
        Part("logits", 1.3 * 4 * chunk * drafted, f"1.3 x 4 B x {chunk} rows x {drafted}"),
    ]


def hardware(facts: TargetFacts, choices: Choices) -> str:
    """What a recipe is meant for, with a tenth of the memory to spare."""
    if facts.hidden_size <= SMALL and _fits(facts, choices, 4):
        return "two CPU cores and 4 GB of memory, or any GPU"
    for size in GPUS:
        if _fits(facts, choices, size):
            return f"one {size} GB GPU"
    return f"several {LARGEST} GB GPUs with --trainer.strategy fsdp"


def count_text(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def size_text(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.2g} MB"
