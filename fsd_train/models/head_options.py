"""The options of a head in a recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from fsd_infer.heads.config import EagleConfig, default_fused_layers
from fsd_infer.targets.target import Target
from fsd_train.types import NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class HeadOptions:
    """The part of :class:`fsd_infer.heads.config.EagleConfig` that does not follow from the target.

    Attributes:
        layout: "eagle3" and "eagle" (EAGLE-1/2) run in other engines; "fsd" is our own.
        num_layers: number of decoder layers.
        intermediate_size: width of the MLP (default: the target's).
        layer: "auto" (the target's own kind of layer if it can run alone) or "llama".
        fused_layers: target layers to read, from 0 (default for eagle3: a low, a middle and a high one).
        input_norm: fsd: keep the first layer's input norm.
        final_norm: fsd: normalise the output like the target's final norm.
        feature_scale: fsd: divide input features by the final norm's weight, which evens out outliers.
        fc_bias: fsd, eagle: add a bias to the projection.
        fc_norm: eagle3: add a norm per fused layer (EAGLE-3.1).
        norm_output: eagle3: feed back the normalised output (EAGLE-3.1).
        own_lm_head: eagle3: train an LM head with the head (default: true); false shares the target's.
    """

    layout: Literal["fsd", "eagle", "eagle3"] = "fsd"
    num_layers: PositiveInt = 1
    intermediate_size: PositiveInt | None = None
    layer: Literal["auto", "llama"] = "auto"
    fused_layers: list[NonNegativeInt] = field(default_factory=list)
    input_norm: bool = False
    final_norm: bool = False
    feature_scale: bool = False
    fc_bias: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_lm_head: bool | None = None

    def config(self, target: Target, draft_vocab_size: int | None) -> EagleConfig:
        """Build the head's config for a target. Raises CheckpointError for an option that the layout lacks."""
        options = {name: value for name, value in asdict(self).items() if value is not None}
        return EagleConfig.for_target(target, draft_vocab_size=draft_vocab_size, **options)

    def capture_layers(self, target: Target) -> list[int]:
        """Return the target layers that the head reads, ascending."""
        if not self.fused_layers and self.layout == "eagle3":
            return default_fused_layers(target)
        return sorted(set(self.fused_layers))
