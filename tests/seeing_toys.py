"""Tiny random models that see images, of every family tested, with processors made here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from fsd_infer import FuzzyDecoder
from fsd_infer.targets.processors import without_others
from tests.text_toys import tiny_tokenizer

SIDE, PATCH = 16, 4  # of a toy's images and their patches, in pixels
MARKS = dict(
    image_token="<image>", video_token="<video>", boi_token="<img>", eoi_token="</img>",
    vision_start_token="<img>", vision_end_token="</img>", start_image_token="<img>", end_image_token="</img>",
    context_image_token="<image>", audio_token="<audio>", boa_token="<sound>", eoa_token="</sound>",
)  # fmt: skip
IMAGE, VIDEO, START, END, VOCAB = 300, 301, 302, 303, 320

_TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
    pad_token_id=2,
)  # fmt: skip
_EYE: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=SIDE, patch_size=PATCH
)
_QWEN_EYE: dict[str, Any] = dict(
    depth=2, hidden_size=32, intermediate_size=64, num_heads=4, out_hidden_size=32, patch_size=PATCH
)
_MULTI = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1])  # M-RoPE
_QWEN = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
_DELTA: dict[str, Any] = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
_PINS = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE]]


def _seen(text: Any, vision: Any, **own: Any) -> dict[str, Any]:
    return {"text_config": {**_TEXT, **text}, "vision_config": vision, **own}


SEEING: dict[str, dict[str, Any]] = {
    "gemma3": _seen(
        dict(sliding_window=8, num_hidden_layers=7), _EYE, mm_tokens_per_image=4, image_token_index=IMAGE,
        boi_token_index=START, eoi_token_index=END,
    ),
    "gemma4": _seen(
        dict(
            sliding_window=8, global_head_dim=8, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8,
            num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"],
            use_bidirectional_attention="vision",
        ),
        dict(**{**_EYE, "num_key_value_heads": 4}, head_dim=8, position_embedding_size=64, pooling_kernel_size=2),
        image_token_id=IMAGE, video_token_id=VIDEO, boi_token_id=START, eoi_token_id=END, audio_config=None,
    ),
    "qwen2_vl": _seen(
        dict(rope_parameters=_MULTI, max_window_layers=2),
        dict(depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=PATCH), **_QWEN,
    ),
    "qwen2_5_vl": _seen(
        dict(rope_parameters=_MULTI, max_window_layers=2),
        dict(**_QWEN_EYE, window_size=16, fullatt_block_indexes=[1]), **_QWEN,
    ),
    "qwen3_vl": _seen(
        dict(rope_parameters=_MULTI),
        dict(**_QWEN_EYE, num_position_embeddings=64, deepstack_visual_indexes=[0, 1]), **_QWEN,
    ),
    "qwen3_5": _seen(
        dict(**_DELTA, rope_parameters={**_MULTI, "partial_rotary_factor": 1.0}),
        dict(**_QWEN_EYE, num_position_embeddings=64), **_QWEN,
    ),
    "glm4v": _seen(
        dict(rope_parameters={**_MULTI, "partial_rotary_factor": 1.0}), dict(**_QWEN_EYE, image_size=SIDE),
        image_token_id=IMAGE, video_token_id=VIDEO, image_start_token_id=START, image_end_token_id=END,
    ),
    "smolvlm": _seen(dict(model_type="llama"), _EYE, image_token_id=IMAGE),
    "idefics3": _seen(dict(model_type="llama"), _EYE, image_token_id=IMAGE),
    "llava": _seen(dict(model_type="llama"), {**_EYE, "model_type": "clip_vision_model"}, image_token_index=IMAGE),
    "llava_next": _seen(
        dict(model_type="llama"), {**_EYE, "model_type": "clip_vision_model"}, image_token_index=IMAGE,
        image_grid_pinpoints=_PINS,
    ),
    "llava_onevision": _seen(
        dict(model_type="qwen2"), {**_EYE, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=IMAGE, video_token_index=VIDEO, image_grid_pinpoints=_PINS,
    ),
    "mistral3": _seen(
        dict(model_type="mistral"), {**_EYE, "model_type": "pixtral", "head_dim": 8}, image_token_index=IMAGE
    ),
    "internvl": _seen(
        dict(model_type="qwen2"), {**_EYE, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
        image_token_id=IMAGE, image_seq_length=4,
    ),
    "paligemma": _seen(
        dict(model_type="gemma"), {**_EYE, "projection_dim": 32, "vision_use_head": False}, image_token_index=IMAGE,
        hidden_size=32, projection_dim=32,
    ),
    "lfm2_vl": _seen(
        dict(layer_types=["conv", "full_attention"]),
        {**_EYE, "num_patches": 64, "vision_use_head": False}, image_token_id=IMAGE, projector_hidden_size=32,
    ),
    "aya_vision": _seen(dict(logit_scale=0.5), {**_EYE, "vision_use_head": False}, image_token_index=IMAGE),
}  # fmt: skip


def seeing_model(family: str, seed: int = 0, scale: float = 4.0) -> Any:
    """A random fp32 model; weights are scaled up so that its answers vary."""
    config = AutoConfig.for_model(family, **SEEING[family])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(scale)
    model.generation_config.eos_token_id = None
    return model


def _template(mark: str) -> str:
    return (
        "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' }}"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
        "{% if p['type'] == 'image' %}{{ '" + mark + "' }}{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
        "{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
    )


def seeing_tokenizer(family: str = "llava") -> Any:
    """The tiny tokenizer with the marks of images, and a chat template that writes them."""
    plain = tiny_tokenizer()
    named = {name: plain.special_tokens_map[name] for name in ("eos_token", "bos_token", "pad_token")}
    made = PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer, **named, extra_special_tokens=MARKS)
    mark = "<img>" if family == "gemma3" else "<img><image></img>" if "qwen" in family or "glm" in family else "<image>"
    made.chat_template = _template(mark)
    return made


_SQUARE = {"height": SIDE, "width": SIDE}
_QWEN_EYES: dict[str, Any] = dict(
    patch_size=PATCH, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
)
# by family: module and class of the processor and of what it makes of images, with their options
PROCESSORS: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "gemma3": ("gemma3", "Gemma3", dict(image_seq_length=4), "gemma3.Gemma3", dict(size=_SQUARE)),
    "qwen2_vl": ("qwen2_vl", "Qwen2VL", {}, "qwen2_vl.Qwen2VL", _QWEN_EYES),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VL", {}, "qwen2_vl.Qwen2VL", _QWEN_EYES),
    "qwen3_vl": ("qwen3_vl", "Qwen3VL", {}, "qwen2_vl.Qwen2VL", _QWEN_EYES),
    "qwen3_5": ("qwen3_vl", "Qwen3VL", {}, "qwen2_vl.Qwen2VL", _QWEN_EYES),
    "glm4v": ("glm4v", "Glm4v", {}, "glm4v.Glm4v", _QWEN_EYES),
    "smolvlm": ("idefics3", "Idefics3", dict(image_seq_len=4), "idefics3.Idefics3", dict(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False,
    )),
    "llava": ("llava", "Llava", dict(
        patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ), "clip.CLIP", dict(size={"shortest_edge": SIDE}, crop_size=_SQUARE)),
    "llava_next": ("llava_next", "LlavaNext", dict(
        patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ), "llava_next.LlavaNext", dict(size={"shortest_edge": SIDE}, crop_size=_SQUARE, image_grid_pinpoints=_PINS)),
    "llava_onevision": ("llava_onevision", "LlavaOnevision", dict(
        num_image_tokens=16, vision_feature_select_strategy="full"
    ), "llava_onevision.LlavaOnevision", dict(size=_SQUARE, image_grid_pinpoints=_PINS)),
    "mistral3": ("pixtral", "Pixtral", dict(
        patch_size=PATCH, spatial_merge_size=2, image_token="<image>", image_break_token="<img>",
        image_end_token="</img>",
    ), "pixtral.Pixtral", dict(size={"longest_edge": SIDE}, patch_size={"height": 2 * PATCH, "width": 2 * PATCH})),
    "internvl": ("internvl", "InternVL", dict(image_seq_length=4), "got_ocr2.GotOcr2", dict(
        size=_SQUARE, crop_to_patches=False
    )),
    "paligemma": ("paligemma", "PaliGemma", {}, "siglip.Siglip", dict(size=_SQUARE, image_seq_length=16)),
    "gemma4": ("gemma4", "Gemma4", dict(image_seq_length=4), "gemma4.Gemma4", dict(
        patch_size=PATCH, pooling_kernel_size=2, max_soft_tokens=70
    )),
}  # fmt: skip
PROCESSORS["idefics3"] = PROCESSORS["smolvlm"]


def seeing_processor(family: str, tokenizer: Any) -> Any:
    """A processor of the family's own classes, without what reads videos and sounds."""
    module, name, options, eyes, sizes = PROCESSORS[family]
    folder, _, eye = eyes.partition(".")
    models = "transformers.models"
    made = getattr(import_module(f"{models}.{folder}.image_processing_pil_{folder}"), f"{eye}ImageProcessorPil")
    kind = without_others(getattr(import_module(f"{models}.{module}.processing_{module}"), f"{name}Processor"))
    return kind(image_processor=made(**sizes), tokenizer=tokenizer, chat_template=tokenizer.chat_template, **options)


def an_image(seed: int = 0, width: int = SIDE, height: int = SIDE) -> Image.Image:
    """Random pixels."""
    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def seeing_decoder(family: str, **options: Any) -> FuzzyDecoder:
    """A decoder of a tiny model in memory, with its processor."""
    processor = seeing_processor(family, seeing_tokenizer(family))
    return FuzzyDecoder.from_pretrained(seeing_model(family), "lookup", processor, **options)


def save_seeing(directory: Path, family: str, with_processor: bool = False) -> Any:
    """Save a tiny model with its tokenizer, or with its processor; return the model."""
    model, tokenizer = seeing_model(family), seeing_tokenizer(family)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if with_processor:
        seeing_processor(family, tokenizer).save_pretrained(directory)
    return model
