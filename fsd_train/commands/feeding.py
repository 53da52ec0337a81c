"""Agreement of a head with its target, fed correctly and in ways that are common mistakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.target import Target
from fsd_train.losses import LMHead
from fsd_train.models.unroll import supervised, unroll
from fsd_train.packed import TextMask

_CHUNK = 512  # positions whose logits are alive at a time
Shift = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Finding:
    """A line of doctor's table.

    Attributes:
        check: name of the check.
        ok: whether it passed; None: a remark.
        says: result.
        fix: remedy; dropped if the check passed.
    """

    check: str
    ok: bool | None
    says: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.ok:
            object.__setattr__(self, "fix", "")


@dataclass
class CheckedRow:
    """A conversation: ids [1, M], mask [1, M], and the target's features [1, M, F] with all watched layers."""

    values: dict[str, Any]
    ids: Tensor
    mask: Tensor
    features: Tensor

    def prompt(self) -> list[int]:
        return self.ids[0, : int(self.mask[0].int().argmax())].tolist()


def _unchanged(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Variant:
    """Another way to feed or read a head, in case the head was trained like that.

    Attributes:
        check: the line of the table.
        what: the variant in words.
        fix: remedy if the head fits the variant.
        layers: inner layers to read; None: the head's own.
        features, tokens: changes of the features [1, M, F] and token ids [1, M] before pairing.
        readout: function from head and outputs to the LM head's input.
        final: layer whose outputs replace the final features.
        change: context in which the head computes otherwise.
        step: chain step to compare.
        below: the head's own agreement must be below this share of the variant's. Above 0.7 the difference may be
            chance, and some variants see the token to predict.
    """

    check: str
    what: str
    fix: str
    layers: list[int] | None = None
    features: Shift = _unchanged
    tokens: Shift = _unchanged
    readout: Callable[[Any, Tensor], Tensor] = lambda head, outputs: head.readout(outputs)
    final: int | None = None
    change: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    step: int = 0
    below: float = 0.7


def at_step(step: int) -> Variant:
    """Return the unchanged head at another chain step."""
    return Variant("", "", "", step=step)


AS_IT_IS = at_step(0)


def other_positions() -> list[Variant]:
    """Return the variants that pair other tokens and features than decoding does."""
    return [
        Variant(
            "positions", "the feature of the token before",
            "pair token i+1 with the feature of token i in training",
            features=lambda x: torch.cat([x[:, :1], x[:, :-1]], 1),
        ),
        Variant(
            "positions", "the feature of the token after, which decoding does not have",
            "pair token i+1 with the feature of token i in training, or train longer: a new head copies its input",
            features=lambda x: torch.cat([x[:, 1:], x[:, -1:]], 1), below=0.2,
        ),
        Variant(
            "positions", "the token that the feature belongs to, not the one after it",
            "shift the tokens by one against the features in training",
            tokens=lambda x: torch.cat([x[:, :1], x[:, :-1]], 1),
        ),
    ]  # fmt: skip


class Feeding:
    """A head, its target and conversations to compare them on.

    Args:
        target: the target; it watches the head's layers and their neighbours.
        head: the head.
        rows: the conversations.
    """

    def __init__(self, target: Target, head: EagleHead, rows: list[CheckedRow]) -> None:
        self.target, self.head, self.rows = target, head, rows
        self.layers = int(target.config.num_hidden_layers)

    @torch.no_grad()
    def drafted(self, variant: Variant = AS_IT_IS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the head's most likely draft vocabulary entries and the target's most likely ids, both [N].

        N counts the positions of all rows at which the chain step is supervised.
        """
        drafted, expected = [], []
        step = variant.step
        for row in self.rows:
            tokens, inputs = variant.tokens(row.ids), self.inputs(row.features, variant)
            embeds = self.head.embed(tokens.roll(-1, 1), self.target).to(dtype)
            mask, roots = TextMask((tokens.shape[1],), tokens.device), torch.arange(tokens.shape[1])
            outputs = unroll(self.head, embeds, inputs.to(dtype), mask, step + 1, roots)[step]
            positions = supervised(row.mask[0], step + 1)[step].nonzero().squeeze(1)
            hidden = variant.readout(self.head, outputs[0, positions - step])
            drafted.append(torch.cat([self._logits(part).argmax(-1) for part in hidden.split(_CHUNK)]))
            final = row.features[0, positions + 1, : self.target.hidden_size]
            expected.append(torch.cat([self.target.lm_logits(part).argmax(-1) for part in final.split(_CHUNK)]))
        return torch.cat(drafted), torch.cat(expected)

    def previous_tokens(self) -> Tensor:
        """Return the tokens [N] before those that :meth:`drafted` returns at the first step."""
        return torch.cat([row.ids[0, supervised(row.mask[0], 1)[0].nonzero().squeeze(1) + 1] for row in self.rows])

    def inputs(self, features: Tensor, variant: Variant = AS_IT_IS) -> Tensor:
        """Return the head's input features, made from the target's features [1, M, F]."""
        layers = self.head.config.fused_layers if variant.layers is None else variant.layers
        inputs = self.target.features_of(features, layers)
        if variant.final is not None:
            raw = self.target.features_of(features, [variant.final])[..., self.target.hidden_size :]
            inputs = torch.cat([raw, inputs[..., self.target.hidden_size :]], -1)
        return variant.features(inputs)

    def _logits(self, hidden: Tensor) -> Tensor:
        lm_head = self.head.lm_head
        logits: Tensor = LMHead.of(self.target, self.head.draft_ids)(hidden) if lm_head is None else lm_head(hidden)
        return logits

    def ids(self, entries: Tensor) -> Tensor:
        return entries if self.head.draft_ids is None else self.head.draft_ids[entries]

    def agreement(self, variant: Variant) -> float:
        """Return the share of supervised positions at which head and target have the same most likely token."""
        with variant.change(self.head):
            drafted, expected = self.drafted(variant)
        return float((self.ids(drafted) == expected).float().mean())

    def positions(self) -> int:
        return sum(int(supervised(row.mask[0], 1).sum()) for row in self.rows)

    def variants(self) -> list[Variant]:
        """Return the variants that some heads were trained with."""
        config, fused_layers = self.head.config, self.head.config.fused_layers
        result = other_positions()
        for offset in (-1, 1):
            shifted = [number + offset for number in fused_layers]
            if fused_layers and shifted[0] >= 0 and shifted[-1] < self.layers:
                fix = f"set fused_layers {shifted} in config.json: programs number layers differently by one"
                what = f"layers {shifted} instead of {fused_layers}"
                result.append(Variant("feature layers", what, fix, layers=shifted))
        final = getattr(self.target.decoder, "norm", None)
        if self.head.norm is None and final is not None:
            result.append(
                Variant("norms", "the target's final norm after it", "set final_norm and copy the norm's weight",
                        readout=lambda head, x: final(x.to(self.target.dtype)).to(x.dtype))
            )  # fmt: skip
        if self.head.eagle3 and not config.norm_output and self.head.norm is not None:
            result.append(Variant("norms", "no norm before the LM head", "remove the norm", readout=lambda head, x: x))
        if self.head.eagle3:
            result.append(
                Variant("norms", f"norm_output {str(not config.norm_output).lower()}",
                        "change norm_output in config.json", change=_other_feedback, step=1)
            )  # fmt: skip
        else:
            result.append(
                Variant("norms", "features from before the target's final norm", "use the inputs of the LM head",
                        final=self.layers - 1)
            )  # fmt: skip
        return result


def _other_feedback(head: EagleHead) -> AbstractContextManager[None]:
    """Swap between feeding back normalised and raw outputs of layout eagle3."""
    return with_values(head, config=dataclasses.replace(head.config, norm_output=not head.config.norm_output))


@contextmanager
def with_values(of: Any, **values: Any) -> Iterator[None]:
    """Give attributes of an object other values in the block."""
    before = {name: getattr(of, name) for name in values}
    try:
        for name, value in values.items():
            setattr(of, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(of, name, value)
