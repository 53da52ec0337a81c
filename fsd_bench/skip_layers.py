"""`fsd-infer skip-layers`: which decoder layers a target's drafter can do without.

Greedy: of the layers that are left, the one is dropped without which the remaining model agrees most often with the
whole target, until so many are left. Agreement is the share of the tokens of the target's own greedy answers that the
remaining model finds likeliest, given the text before them: the chance that a draft is accepted by ``exact`` at
temperature 0 after drafts that were. Each step tries every layer that is left, one forward over all texts each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fsd_infer.chat.conversations import row_messages
from fsd_infer.chat.encoding import encode_chat
from fsd_infer.chat.rows import read_rows
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.errors import DataError, FsdError
from fsd_infer.targets.sharing import with_layers
from fsd_infer.targets.target import Target

AT_ONCE = 8  # texts


@dataclass(frozen=True)
class Answered:
    """Token ids of a prompt with its answer, which begins at place ``start``."""

    ids: list[int]
    start: int


@dataclass(frozen=True)
class Step:
    """Layers that are left, and how often they agree with all of them."""

    layers: tuple[int, ...]
    agreement: float


def answers(decoder: FuzzyDecoder, path: str | Path, limit: int, max_new_tokens: int) -> list[Answered]:
    """The target's greedy answers to the first ``limit`` prompts of a file, as for `fsd-infer bench`.

    Raises:
        DataError: a row without a prompt, or no rows.
    """
    found: list[Answered] = []
    chat = bool(getattr(decoder.tokenizer, "chat_template", None))
    for row in read_rows(path):
        if len(found) == limit:
            break
        messages = row_messages(row.values, row.where)
        prompt = encode_chat(decoder.tokenizer, messages) if chat else decoder.encode(messages[-1]["content"], False)
        answer = decoder.generate(prompt, max_new_tokens=max_new_tokens, temperature=0.0).sequences[0]
        found.append(Answered([*prompt, *answer], len(prompt)))
    if not found:
        raise DataError(f"{path}: no prompts. Give a file with one or more.")
    return sorted(found, key=lambda text: len(text.ids))


@torch.inference_mode()
def agreement(model: Target, texts: Sequence[Answered]) -> float:
    """The share of the answers' tokens that the model finds likeliest."""
    agreed = count = 0
    for first in range(0, len(texts), AT_ONCE):
        part = texts[first : first + AT_ONCE]
        longest = max(len(text.ids) for text in part)
        ids = torch.tensor([text.ids + [0] * (longest - len(text.ids)) for text in part], device=model.device)
        places = torch.arange(longest, device=model.device)
        lengths, starts = (
            torch.tensor(values, device=model.device)[:, None]
            for values in ([len(text.ids) for text in part], [text.start for text in part])
        )
        features = model.features(ids, (places < lengths).long())[..., : model.hidden_size]
        asked = (places >= starts) & (places < lengths)
        guesses = model.lm_logits(features[:, :-1][asked[:, 1:]]).argmax(-1)
        agreed += int((guesses == ids[:, 1:][asked[:, 1:]]).sum())
        count += len(guesses)
    return agreed / count


def search(target: Target, texts: Sequence[Answered], left: int) -> Iterator[Step]:
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


def _step(target: Target, texts: Sequence[Answered], layers: tuple[int, ...]) -> Step:
    return Step(layers, agreement(with_layers(target, layers, f"{len(layers)} layers"), texts))
