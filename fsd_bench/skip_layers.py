"""`fsd-bench skip-layers`: find the decoder layers that a drafter made of the target can skip.

The search is greedy. Each step drops the layer whose loss keeps the agreement with the whole target highest. Agreement
is the share of tokens of the target's own greedy answers that the smaller model finds likeliest, given the text before
them. That is the chance that ``exact`` accepts a draft at temperature 0 after accepted drafts. A step costs one forward
over all texts per remaining layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsd_bench.likelihood import log_likelihoods
from fsd_bench.prompts import Encoder, encode_rows, first_rows
from fsd_core.errors import FsdError
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters.from_target import with_layers
from fsd_infer.targets.target import Target

Pair = tuple[list[int], list[int]]  # token ids of a prompt and of its answer


@dataclass(frozen=True)
class LayerSubset:
    """The remaining layers, and how often they agree with the whole target."""

    layers: tuple[int, ...]
    agreement: float


def answers(
    decoder: FuzzyDecoder, path: str | Path, limit: int, max_new_tokens: int, strict: bool = False
) -> list[Pair]:
    """Return the first ``limit`` prompts of a file with the target's greedy answers.

    Raises:
        DataError: a row without a prompt, or no rows.
    """
    encode = Encoder.of(decoder, raw=not getattr(decoder.tokenizer, "chat_template", None))
    prompts = encode_rows(first_rows(path, encode, limit, strict=strict), encode)
    outputs = (decoder.generate(ids, max_new_tokens=max_new_tokens, temperature=0.0).sequences[0] for ids in prompts)
    return list(zip(prompts, outputs))


def agreement(model: Target, texts: Sequence[Pair]) -> float:
    """Return the share of the answers' tokens that the model finds likeliest."""
    return sum(agreed for _, agreed in log_likelihoods(model, texts)) / sum(len(answer) for _, answer in texts)


def search(target: Target, texts: Sequence[Pair], keep: int) -> Iterator[LayerSubset]:
    """Yield all layers, then one fewer at a time down to ``keep``. Raises FsdError."""
    count = int(target.config.num_hidden_layers)
    if not 1 <= keep < count:
        raise FsdError(f"--layers goes from 1 to {count - 1}, of the {count} that {target.name} has; got {keep}.")
    layers = tuple(range(count))
    yield LayerSubset(layers, agreement(target, texts))
    while len(layers) > keep:
        subsets = [tuple(other for other in layers if other != dropped) for dropped in layers]
        yield (best := max((_step(target, texts, remaining) for remaining in subsets), key=lambda step: step.agreement))
        layers = best.layers


def _step(target: Target, texts: Sequence[Pair], layers: tuple[int, ...]) -> LayerSubset:
    return LayerSubset(layers, agreement(with_layers(target, layers, f"{len(layers)} layers"), texts))
