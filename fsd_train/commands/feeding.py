"""How a head agrees with its target, fed as it should be and in the ways that heads are known to be fed by mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.target import Target
from fsd_train.models.unroll import supervised, unroll

_CHUNK = 512  # positions whose logits are alive at a time
Shift = Callable[[Tensor], Tensor]


@dataclass
class Row:
    """A conversation: ids [1, M], mask [1, M], and the target's features [1, M, F] with every watched layer."""

    values: dict[str, Any]
    ids: Tensor
    mask: Tensor
    features: Tensor

    def prompt(self) -> list[int]:
        return self.ids[0, : int(self.mask[0].int().argmax())].tolist()


def _same(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Variant:
    """Another way to feed or read a head, which is the right one where a head was trained so.

    Attributes:
        check: the line of the table that it belongs to.
        what: it in words.
        fix: what to do if the head wants it so.
        layers: inner layers to read; None: the head's own.
        features, tokens: what is done to the features [1, M, F] and to the token ids [1, M] before pairing.
        readout: how the LM head's input is made of the outputs.
        final: layer whose outputs stand in the final features' place.
        feedback: feed back normalised outputs where the head feeds back raw ones, and the other way round.
        step: chain step that is compared.
        below: the head's own agreement must be below this share of the variant's: more than 0.7 may be chance, and
            some variants see what is to be predicted.
    """

    check: str
    what: str
    fix: str
    layers: list[int] | None = None
    features: Shift = _same
    tokens: Shift = _same
    readout: Callable[[EagleHead, Tensor], Tensor] = EagleHead.readout
    final: int | None = None
    feedback: bool = False
    step: int = 0
    below: float = 0.7


def at_step(step: int) -> Variant:
    """The head as it is, at another chain step."""
    return Variant("", "", "", step=step)


AS_IT_IS = at_step(0)


class Feeding:
    """A head, its target and conversations.

    Args:
        target: the target; it watches the head's layers and those beside them.
        head: the head.
        rows: what is looked at.
    """

    def __init__(self, target: Target, head: EagleHead, rows: list[Row]) -> None:
        self.target, self.head, self.rows = target, head, rows
        self.layers = int(target.config.num_hidden_layers)

    @torch.no_grad()
    def drafted(self, variant: Variant = AS_IT_IS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """(draft vocabulary entries that the head finds most likely, the target's most likely ids), both [N].

        At every position whose chain step is supervised, all rows together.
        """
        found, wanted = [], []
        step = variant.step
        for row in self.rows:
            tokens, inputs = variant.tokens(row.ids), self.inputs(row.features, variant)
            embeds = self.head.embed(tokens[:, 1:], self.target).to(dtype)
            roots = torch.arange(tokens.shape[1] - 1, device=tokens.device)[None] if step else tokens.new_zeros(1, 0)
            outputs = unroll(self.head, embeds, inputs[:, :-1].to(dtype), step + 1, roots)[step]
            where = supervised(row.mask, step + 1)[step, 0].nonzero().squeeze(1)
            read = variant.readout(self.head, outputs[0, where - step])
            found.append(torch.cat([self._logits(part).argmax(-1) for part in read.split(_CHUNK)]))
            final = row.features[0, where + 1, : self.target.hidden_size]
            wanted.append(torch.cat([self.target.lm_logits(part).argmax(-1) for part in final.split(_CHUNK)]))
        return torch.cat(found), torch.cat(wanted)

    def inputs(self, features: Tensor, variant: Variant = AS_IT_IS) -> Tensor:
        """What the head reads of the target's features [1, M, F]."""
        layers = self.head.config.fused_layers if variant.layers is None else variant.layers
        inputs = self.target.features_of(features, layers)
        if variant.final is not None:
            raw = self.target.features_of(features, [variant.final])[..., self.target.hidden_size :]
            inputs = torch.cat([raw, inputs[..., self.target.hidden_size :]], -1)
        return variant.features(inputs)

    def _logits(self, read: Tensor) -> Tensor:
        if self.head.lm_head is not None:
            logits: Tensor = self.head.lm_head(read)
            return logits
        weight = self.target.lm_head_rows(self.head.draft_ids)[0]
        return read.to(weight.dtype) @ weight.mT

    def ids(self, entries: Tensor) -> Tensor:
        return entries if self.head.draft_ids is None else self.head.draft_ids[entries]

    def agreement(self, variant: Variant) -> float:
        """Share of supervised positions where the head's most likely token is the target's."""
        with self._feedback(variant.feedback):
            found, wanted = self.drafted(variant)
        return float((self.ids(found) == wanted).float().mean())

    def positions(self) -> int:
        return sum(int(supervised(row.mask, 1).sum()) for row in self.rows)

    def variants(self) -> list[Variant]:
        """What heads are known to have been trained with instead."""
        config, own = self.head.config, self.head.config.fused_layers
        found = [
            Variant(
                "positions", "the feature of the token before",
                "pair token i+1 with the feature of token i in training",
                features=lambda x: torch.cat([x[:, :1], x[:, :-1]], 1),
            ),
            Variant(
                "positions", "the feature of the token after, which is not there in decoding",
                "pair token i+1 with the feature of token i in training",
                features=lambda x: torch.cat([x[:, 1:], x[:, -1:]], 1), below=0.2,
            ),
            Variant(
                "positions", "the token that the feature belongs to, not the one after it",
                "shift the tokens by one against the features in training",
                tokens=lambda x: torch.cat([x[:, :1], x[:, :-1]], 1),
            ),
        ]  # fmt: skip
        for move in (-1, 1):
            moved = [number + move for number in own]
            if own and moved[0] >= 0 and moved[-1] < self.layers:
                fix = f"write fused_layers {moved} into config.json: programs number layers differently by one"
                found.append(Variant("feature layers", f"layers {moved} instead of {own}", fix, layers=moved))
        final = getattr(self.target.decoder, "norm", None)
        if self.head.norm is None and final is not None:
            found.append(
                Variant("norms", "the target's final norm after it", "set final_norm, and give the head its weight",
                        readout=lambda head, x: final(x.to(self.target.dtype)).to(x.dtype))
            )  # fmt: skip
        if self.head.eagle3 and not config.norm_output and self.head.norm is not None:
            found.append(Variant("norms", "no norm before the LM head", "leave norm out", readout=lambda head, x: x))
        if self.head.eagle3:
            found.append(
                Variant("norms", f"norm_output {str(not config.norm_output).lower()}",
                        "change norm_output in config.json", feedback=True, step=1)
            )  # fmt: skip
        else:
            found.append(
                Variant("norms", "features from before the target's final norm", "take what enters the LM head",
                        final=self.layers - 1)
            )  # fmt: skip
        return found

    @contextmanager
    def _feedback(self, flipped: bool) -> Iterator[None]:
        """With ``flipped`` a head of layout eagle3 feeds back what it otherwise does not: normalised or raw outputs."""
        config = self.head.config
        self.head.config = dataclasses.replace(config, norm_output=config.norm_output != flipped)
        try:
            yield
        finally:
            self.head.config = config
