"""`fsd-infer skip-layers`: which decoder layers a target's drafter can do without.

Greedy: of the layers that are left, the one is dropped without which the remaining model agrees most often with the
whole target, until so many are left. Agreement is the share of the tokens of the target's own greedy answers that the
remaining model finds likeliest, given the text before them: the chance that a draft is accepted by ``exact`` at
temperature 0 after drafts that were. Each step tries every layer that is left, one forward over all texts each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fsd_bench.likelihood import log_likelihoods
from fsd_bench.runner import encode_row
from fsd_infer.chat.encoding import read_prompts
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.errors import DataError, FsdError
from fsd_infer.targets.sharing import with_layers
from fsd_infer.targets.target import Target

Pair = tuple[list[int], list[int]]  # token ids of a prompt and of its answer


@dataclass(frozen=True)
class Step:
    """Layers that are left, and how often they agree with all of them."""

    layers: tuple[int, ...]
    agreement: float


def answers(decoder: FuzzyDecoder, path: str | Path, limit: int, max_new_tokens: int) -> list[Pair]:
    """The target's greedy answers to the first ``limit`` prompts of a file, as for `fsd-infer bench`.

    Raises:
        DataError: a row without a prompt, or no rows.
    """
    found: list[Pair] = []
    chat = bool(getattr(decoder.tokenizer, "chat_template", None))
    for row in islice(read_prompts(path), limit):
        prompt = encode_row(row, decoder.target.name, decoder.tokenizer, decoder.target.max_positions, raw=not chat)
        answer = decoder.generate(prompt, max_new_tokens=max_new_tokens, temperature=0.0).sequences[0]
        found.append((prompt, answer))
    if not found:
        raise DataError(f"{path}: no prompts. Give a file with one or more.")
    return found


def agreement(model: Target, texts: Sequence[Pair]) -> float:
    """The share of the answers' tokens that the model finds likeliest."""
    return sum(agreed for _, agreed in log_likelihoods(model, texts)) / sum(len(answer) for _, answer in texts)


def search(target: Target, texts: Sequence[Pair], left: int) -> Iterator[Step]:
    """All layers first, then one less at a time until ``left`` are. Raises FsdError."""
    count = int(target.config.num_hidden_layers)
    if not 1 <= left < count:
        raise FsdError(f"--layers goes from 1 to {count - 1}, of the {count} that {target.name} has; got {left}.")
    layers = tuple(range(count))
    yield Step(layers, agreement(target, texts))
    while len(layers) > left:
        tried = [tuple(other for other in layers if other != dropped) for dropped in layers]
        yield (best := max((_step(target, texts, kept) for kept in tried), key=lambda step: step.agreement))
        layers = best.layers


def _step(target: Target, texts: Sequence[Pair], layers: tuple[int, ...]) -> Step:
    return Step(layers, agreement(with_layers(target, layers, f"{len(layers)} layers"), texts))
