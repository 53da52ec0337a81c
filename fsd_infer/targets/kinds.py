"""Which of transformers' classes a checkpoint is loaded with: a causal LM, or one that also sees images."""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)

from fsd_core.errors import ModelLoadError

# Only the eager implementation has their attention (soft-capped scores; sinks).
EAGER_FAMILIES = frozenset({"gemma2", "gpt_oss"})
_READS_PIXELS_BY_ATTENTION = ("cross_attention_layers", "cross_layer_interval")  # Mllama's and Idefics's


def is_seeing(config: PretrainedConfig) -> bool:
    """Whether a checkpoint is of an image-text-to-text class, by its architecture, or because it has no other."""
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return getattr(model_class, "__name__", str(model_class)) in (config.architectures or ())


def auto_class(config: PretrainedConfig) -> Any:
    """Return the auto class of transformers that loads a checkpoint.

    Raises:
        ModelLoadError: an encoder-decoder family, or one that reads something else than text and
            images.
    """
    check_image_model(config)
    if is_seeing(config):
        return AutoModelForImageTextToText
    mapped = {**(getattr(config, "auto_map", None) or {})}
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in mapped
    if not is_known and (config.get_text_config(decoder=True) is not config or hasattr(config, "audio_config")):
        raise ModelLoadError(
            f"{config.model_type} is of no class that reads text, or text and images (it may read or write audio). "
            "Give a causal LM or an image-text-to-text model as target."
        )
    return AutoModelForCausalLM  # its error names the families that it knows


def class_of(config: PretrainedConfig) -> Any:
    """Return the model class that :func:`auto_class` loads; None for a family outside transformers."""
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_seeing(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    return mapping[type(config)] if type(config) in mapping else None


def check_image_model(config: PretrainedConfig) -> None:
    """Raise ModelLoadError for families with an encoder, or that do not read images as tokens of the prompt."""
    text: Any = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise ModelLoadError(f"{config.model_type} has an encoder beside its decoder: a causal LM is needed as target.")
    if any(getattr(text, name, None) for name in _READS_PIXELS_BY_ATTENTION):
        raise ModelLoadError(
            f"{config.model_type} attends to images by cross-attention, which no draft tree can be "
            "verified with here. Give a model that reads images as tokens of its prompt."
        )


def attention_for(config: PretrainedConfig) -> str:
    """Return the attention implementation that supports tree masks for a family: "sdpa", else "eager"."""
    families = {config.model_type, config.get_text_config(decoder=True).model_type}
    return "sdpa" if not families & EAGER_FAMILIES and getattr(class_of(config), "_supports_sdpa", False) else "eager"
