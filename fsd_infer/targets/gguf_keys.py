"""The metadata keys of GGUF files: read, harmless, or refused by name.

llama.cpp's loader is the reference: a key that it reads for an architecture and that changes the computation is either
read here too, or must hold the value at which it changes nothing. Unknown keys are named in a warning.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from fsd_core.errors import ModelLoadError
from fsd_core.registry import is_number, is_whole

LONGEST = 2**31 - 1

# keys after the architecture's name
_READ = frozenset(
    """
    context_length embedding_length block_count feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    rope.freq_base rope.dimension_count rope.scale_linear rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.attn_factor rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow
    """.split()
)
_HARMLESS = frozenset(  # the last four are of layers with a window
    """
    rope.scaling.finetuned tensor_data_layout attention.layer_norm_epsilon decoder_start_token_id
    attention.key_length_swa attention.value_length_swa rope.dimension_count_swa rope.freq_base_swa
    """.split()
)
# values at which a key changes nothing; with any other value the file is refused
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), (0, 1)),
    **dict.fromkeys(
        """
        expert_count expert_used_count expert_shared_count expert_group_count expert_group_used_count
        expert_feed_forward_length expert_shared_feed_forward_length expert_weights_norm expert_gating_func
        leading_dense_block_count interleave_moe_layer_step nextn_predict_layers n_deepstack_layers pooling_type
        attention.sliding_window attention.sliding_window_pattern attention.clamp_kqv attention.max_alibi_bias
        attention.scale attention.output_scale attention.temperature_length attention.temperature_scale
        attention.q_lora_rank attention.kv_lora_rank attention.shared_kv_layers attn_logit_softcapping
        final_logit_softcapping router_logit_softcapping swin_norm rope.dimension_sections rope.scaling.alpha
        rope.scaling.yarn_log_multiplier classifier.output_labels embedding_length_out embedding_length_per_layer_input
        activation_sparsity_scale full_attention_interval features_length hidden_activation rescale_every_n_layers
        expert_chunk_feed_forward_length expert_group_scale experts_per_group moe_every_n_layers moe_latent_size
        swiglu_clamp_exp swiglu_clamp_shexp deepstack_mapping decoder_block_count hash_layer_count norm_before_residual
        attention.value_scale attention.key_length_mla attention.value_length_mla attention.indexer.head_count
        attention.indexer.key_length attention.indexer.top_k attention.output_group_count attention.output_lora_rank
        attention.compress_rope_freq_base attention.compress_ratios attention.recurrent_layers
        attention.relative_buckets_count hyper_connection.count ssm.conv_kernel ssm.inner_size ssm.state_size
        ssm.time_step_rank ssm.group_count ssm.dt_b_c_rms kda.head_dim wkv.head_size shortconv.l_cache target_layers
        attention.group_norm_epsilon attention.group_norm_groups attention.decay_lora_rank attention.iclr_lora_rank
        attention.value_residual_mix_lora_rank attention.gate_lora_rank time_mix_extra_dim time_decay_extra_dim
        token_shift_count altup.active_idx altup.num_inputs posnet.embedding_length posnet.block_count
        convnext.embedding_length convnext.block_count dense_2_feat_in dense_2_feat_out dense_3_feat_in dense_3_feat_out
        """.split(),
        (0,),
    ),
}
# keys without an architecture
_KNOWN = re.compile(
    r"""general\.(architecture|type|alignment|quantization_version|file_type|name|author|version|organization|finetune
    |basename|description|quantized_by|size_label|license.*|url|doi|uuid|repo_url|source\..*|base_model\..*|dataset\..*
    |tags|languages|datasets)
    |split\..*|quantize\..*|imatrix\..*
    |tokenizer\.ggml\.(model|pre|tokens|token_type|token_type_count|scores|merges
    |(bos|eos|eot|eom|unknown|padding|sep.rator|mask|cls)_token_id
    |(fim_(pre|suf|mid|pad|rep|sep)|prefix|suffix|middle)_token_id
    |add_bos_token|add_eos_token|add_sep_token|add_space_prefix|remove_extra_whitespaces|precompiled_charsmap)
    |tokenizer\.huggingface\.json|tokenizer\.chat_templates?(\..*)?""",
    re.VERBOSE,
)
# tokens at which llama.cpp ends an answer, by key and by text (llama-vocab.cpp, `special_eog_ids`)
_ENDS = tuple(f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
_END_TEXTS = tuple(
    """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>
    <｜end▁of▁sentence｜> [e~[
    """.split()
)
# infilling ends at these, where the file does not name the token of that role; the first one that it has
_FIM_TEXTS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# texts that end no answer where all of the others are there: channels of gpt-oss and Solar, and Gemma 4's unused </s>
_NO_ENDS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|return|>", "<|calls|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)
# Qwen3.5's files are read without their MTP layers, by a reader whose table is code; these are its keys
_WITHOUT_MTP = frozenset({"qwen35", "qwen35moe"})
_QWEN35 = frozenset(
    """
    rope.dimension_sections rope.dimension_count ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank
    ssm.group_count full_attention_interval expert_count expert_used_count expert_feed_forward_length
    expert_shared_feed_forward_length nextn_predict_layers
    """.split()
)
# keys that a config must agree with where transformers' reader takes its own default
_EPSILON = "attention.layer_norm_epsilon"
_AGREE = frozenset({"rope.freq_base", "rope.dimension_count", _EPSILON})
# where a config of transformers holds what its GGUF reader takes from defaults or from tensors
_ATTRIBUTES = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "use_parallel_residual": "use_parallel_residual",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "hidden_activation": "hidden_act",
}


def architecture_keys(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the file's architecture, without its name."""
    prefix = f"{facts.get('general.architecture')}."
    return {name.removeprefix(prefix): value for name, value in facts.items() if name.startswith(prefix)}


def check_keys(facts: Mapping[str, Any], source: Any, read: Collection[str] = ()) -> None:
    """Raise ModelLoadError for keys of a Llama-like architecture that ask for what its model does not compute.

    Warns of keys that nothing here knows.

    Args:
        facts: metadata of the file.
        source: its name for errors.
        read: keys that the model's family has and most others have not.
    """
    keys, family = architecture_keys(facts), facts.get("general.architecture")
    window = keys.get("attention.sliding_window")
    if "attention.sliding_window" not in read and is_number(window) and window >= keys.get("context_length", LONGEST):
        del keys["attention.sliding_window"]  # it never ends before the context does
    if "expert_count" in read and keys.get("expert_gating_func") == 1:
        del keys["expert_gating_func"]  # a softmax, as in all families that are read here
    if keys.get("embedding_length_out") == keys.get("embedding_length"):
        keys.pop("embedding_length_out", None)
    for name, value in keys.items():
        if name not in read and not _is_neutral(name, value, _NEUTRAL):
            raise ModelLoadError(
                f"{source}: {family}.{name} is {value!r:.60}, which a {family} model here does not compute. Use "
                "another file of this model, or its checkpoint."
            )
    _check_others(facts, source)
    _warn_unknown_keys(facts, _READ | _HARMLESS | _NEUTRAL.keys(), source)


def check_no_mtp(facts: Mapping[str, Any], tensors: Collection[str], source: Any) -> None:
    """Raise ModelLoadError for a file with MTP layers, but for Qwen3.5, whose reader leaves them out: warn of these.

    Args:
        facts: metadata of the file.
        tensors: their names.
        source: the file's name for errors.
    """
    family = facts.get("general.architecture")
    stated = facts.get(f"{family}.nextn_predict_layers", 0)
    layers = sorted({name.split(".nextn.")[0] for name in tensors if ".nextn." in name})
    if (stated or layers) and family in _WITHOUT_MTP:
        warnings.warn(
            f"{source}: its MTP layers are left out. Those of the model's safetensors draft (--drafter mtp).",
            stacklevel=5,
        )
    elif stated or layers:
        where = f" ({', '.join(layers)})" if layers else ""
        raise ModelLoadError(
            f"{source} holds MTP layers{where}, {family}.nextn_predict_layers is {stated!r:.40}. They are read from "
            "safetensors alone: give the model's checkpoint, whose MTP layers draft (--drafter mtp), or a file of the "
            "model without them."
        )


def check_foreign_keys(facts: Mapping[str, Any], config: Any, mapped: Mapping[str, Any], source: Any) -> None:
    """Raise ModelLoadError for keys that change the computation and that transformers' reader leaves out.

    Args:
        facts: metadata of the file.
        config: what the reader made of it.
        mapped: the reader's table for this architecture: names in the config, or None, by key.
        source: the file's name for errors.
    """
    _check_others(facts, source)
    config = config.get_text_config(decoder=True)
    rescaled = "'factor'" in str(getattr(config, "rope_parameters", None))
    scaling = dict.fromkeys(("rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor"), (0, 1))
    softmax = {"expert_gating_func": (0, 1)} if mapped.get("expert_count") else {}
    coded = _QWEN35 if facts.get("general.architecture") in _WITHOUT_MTP else frozenset()
    for name, value in architecture_keys(facts).items():
        read = bool(mapped.get(name)) or name in mapped and name.startswith("expert_") or name in scaling and rescaled
        known: Any = _config_value(config, name)
        same = known == value or is_number(value) and is_number(known) and math.isclose(known, value, rel_tol=1e-5)
        differs = name in _AGREE and is_number(known) or not _is_neutral(name, value, _NEUTRAL | scaling | softmax)
        if differs and not read and not same and name not in coded:
            raise ModelLoadError(
                f"{source}: transformers' reader leaves out {facts['general.architecture']}.{name} = {value!r:.60}. "
                "Use the model's checkpoint."
            )
    _warn_unknown_keys(facts, _READ | _HARMLESS | _NEUTRAL.keys() | mapped.keys(), source)


def _config_value(config: Any, name: str) -> Any:
    """Return what a config holds of a key; None if nothing, or several values for kinds of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    if name == "rope.freq_base":
        return rope.get("rope_theta")
    if name == "rope.dimension_count" and "rope_theta" in rope:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(width * (rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1))
    if name == _EPSILON:
        names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
        return next((getattr(config, field) for field in names if hasattr(config, field)), None)
    return getattr(config, _ATTRIBUTES.get(name, ""), None)


def _warn_unknown_keys(facts: Mapping[str, Any], known: Collection[str], source: Any) -> None:
    """Warn of keys that nothing reads."""
    family = facts.get("general.architecture")
    strange = [f"{family}.{name}" for name in architecture_keys(facts) if name not in known]
    strange += [name for name in facts if not name.startswith(f"{family}.") and not _KNOWN.fullmatch(name)]
    if strange:
        warnings.warn(f"{source}: these keys are read by nothing: {', '.join(sorted(strange))}.", stacklevel=5)


def _check_others(facts: Mapping[str, Any], source: Any) -> None:
    """Raise ModelLoadError for a part of a file, for a file that is not a model, and for token ids out of range."""
    parts = facts.get("split.count", 1)
    if not is_number(parts) or parts > 1:
        raise ModelLoadError(f"{source} is one of {parts} parts. Merge them with llama-gguf-split first.")
    file_type = facts.get("general.type", "model")
    if file_type != "model":
        raise ModelLoadError(f"{source} holds no model but, by general.type, {file_type!r:.40}. Give the model's file.")
    if facts.get("tokenizer.ggml.add_sep_token"):
        raise ModelLoadError(f"{source}: tokenizer.ggml.add_sep_token is for encoders. Use another file.")
    tokens = facts.get("tokenizer.ggml.tokens")
    for name, value in facts.items():
        if name.startswith("tokenizer.ggml.") and name.endswith("_token_id"):
            if not is_whole(value, 0, LONGEST if tokens is None else len(tokens) - 1):
                raise ModelLoadError(f"{source}: {name} is {value!r:.40}, which is not a token. Fetch the file again.")


def end_ids(facts: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end an answer, as llama.cpp finds them by key and by text, the file's EOS first."""
    ids = {text: index for index, text in enumerate(facts.get("tokenizer.ggml.tokens", ()))}
    ends = [facts[name] for name in _ENDS if name in facts]
    for role, texts in _FIM_TEXTS.items():
        if f"tokenizer.ggml.{role}_token_id" not in facts:
            ends += [ids[text] for text in texts if text in ids][:1]
    ends += [ids[text] for text in _END_TEXTS if text in ids]
    without = {ids[text] for text, others in _NO_ENDS if text in ids and others <= ids.keys()}
    return [index for index in dict.fromkeys(ends) if index not in without]


class KeyNumbers:
    """Reads numbers of an architecture's keys. Its methods raise ValueError with the key's name for absurd values."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self.values = keys

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number from 1 on. A list with one per layer counts if all are equal."""
        value = self._value(name, default)
        value = value[0] if isinstance(value, list) and value and value == value[:1] * len(value) else value
        if not is_whole(value, 1, LONGEST):
            raise ValueError(f"{name} is {value!r:.60}; a whole number from 1 on is needed, the same in all layers")
        return int(value)

    def number(self, name: str, default: float | None = None, most: float = 1e12) -> float:
        """Return a number above 0 and at most ``most``."""
        value = self._value(name, default)
        if not is_number(value) or not 0 < value <= most:
            raise ValueError(f"{name} is {value!r:.60}; a number above 0 and up to {most:g} is needed")
        return float(value)

    def _value(self, name: str, default: Any) -> Any:
        if name not in self.values and default is None:
            raise ValueError(f"{name} is missing")
        return self.values.get(name, default)


def _is_neutral(name: str, value: Any, table: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether a key changes nothing at this value, or a table does not hold it."""
    return name not in table or all(item in table[name] for item in (value if isinstance(value, list) else [value]))
