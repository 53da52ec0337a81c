"""Checks of a model's files before transformers reads them, and of a loaded model before it serves as a target."""

from __future__ import annotations

import inspect
import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers import __version__ as VERSION

from fsd_core.errors import CheckpointError, ModelLoadError
from fsd_core.files import open_safetensors, read_json, read_weight_map
from fsd_infer.device.cache import RECURRENT, WITHOUT_KEYS, cache_argument
from fsd_infer.recurrent.mixers import read_past_forward, read_trees
from fsd_infer.targets.kinds import auto_class, check_image_model
from fsd_infer.targets.masks import layer_types, layer_windows, max_positions
from fsd_infer.targets.token_ids import eos_ids
from fsd_infer.targets.weights import shape_of, stay_plain

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
MAX_INTEGER = 2**53  # of a whole number in a config, with room for sums in 64 bits
_LAYER = re.compile(r"(?:(?:model|language_model|backbone|transformer)\.)*layers\.(\d+)\.")
_JOINS = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\.")  # parts of an MTP layer among the model's
_TABLE = re.compile(r"(^|\.)(embed_tokens|embeddings|lm_head)\.weight$")
_NOT_COUNTS = ("per_layer", "max_window_layers")  # sizes of Gemma 4; Qwen's first layer with a window, by default 28
# tensors that belong to a quantised weight, by the ends of their names
QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|.*(weight|_proj)_(packed|shape|zero_point|g_idx|(global_)?scale(_inv|_2)?)|"
    r".*absmax|.*quant_\w+)$"
)
# scales to round activations, keys and values to fp8, without which these are only more precise
ROUNDINGS = re.compile(r".*\.(input|output|activation|[qkv])_scale$")
# numbers of rotary embeddings
_ABOVE_0 = {"rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_CACHE_LENGTH_CALLS = {"get_query_offset"}, {"update_indexer", "get_seq_length"}  # what such code asks of a cache
_DOGE_IS_CAUSAL = (5, 18)  # first version of transformers whose Doge has a causal mask under sdpa, too
_CAUSAL_ANYWAY = {"gpt_neox", "gpt_neox_japanese"}  # their configs have an is_decoder that nothing reads


def check_directory(directory: Path) -> None:
    """Raise CheckpointError or ModelLoadError, with the file's name, for common damage of a model directory."""
    if not (directory / "config.json").is_file():
        files = sorted(directory.glob("*.gguf"))
        advice = f"give the GGUF file, as {files[0]}" if files else "it is not a Hugging Face model directory"
        raise ModelLoadError(f"{directory} has no config.json: {advice}.")
    shards = weight_files(directory)
    if not shards:
        raise ModelLoadError(
            f"{directory} has no safetensors weights. Other formats can run code and are not loaded; convert the "
            "weights with save_pretrained of transformers."
        )
    types = dict[str, str]()
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(f"{shard} is missing although {_INDEX} names it; copy the model again.")
        with open_safetensors(shard, "Copy or fetch it again.") as file:
            types |= {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}
    _check_layers(directory / "config.json", types)
    generation = directory / "generation_config.json"  # transformers decodes without one that it cannot read
    advice = "Copy the model again, or delete this file."
    if generation.is_file() and not isinstance(read_json(generation, advice, CheckpointError), dict):
        raise CheckpointError(f"{generation} is not a JSON object. {advice}")


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors that transformers reads in a directory, else all; a shard of the index may be missing."""
    single, index = directory / "model.safetensors", directory / _INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        return [directory / name for name in sorted(set(read_weight_map(index, "Copy the model again.").values()))]
    return sorted(directory.glob("*.safetensors"))


def _check_layers(path: Path, types: Mapping[str, str]) -> None:
    """Raise for MTP layers without a model, for a config with more layers than tensors, and for fp8 without scales.

    transformers would build the layers, and take the fp8 numbers for the weights.

    Args:
        path: path of the config.
        types: safetensors' type of each tensor.
    """
    config, names, tensors = read_json(path, "Copy the model again.", CheckpointError), types.keys(), len(types)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object: it is not the config of a model.")
    fp8 = (name for name, dtype in types.items() if dtype.startswith("F8") and "E8M0" not in dtype)  # E8M0: of scales
    bare = [name for name in fp8 if not _has_scale(name, names)]
    quantization = config.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{path}: quantization_config is {quantization!r:.60}, not an object; copy it again.")
    if bare and quantization.get("quant_method") == "fp8":
        raise CheckpointError(
            f"{path.parent}: {bare[0]} is of type {types[bare[0]]} without {bare[0]}_scale_inv, and config.json says "
            "that its weights are fp8 with scales. Fetch it again."
        )
    if is_mtp_alone(names, config):
        raise CheckpointError(
            f"{path.parent} holds the MTP layers of a model alone, not the model: name the model as target, and this "
            f"directory as its drafter (--drafter {path.parent})."
        )
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for name, value in (pair for part in parts for pair in part.items()):
        counts = "layer" in name and not any(part in name for part in _NOT_COUNTS)
        if counts and isinstance(value, (int, float)) and value > tensors:
            raise CheckpointError(f"{path}: {name} is {value:g}, but there are {tensors} tensors; copy it again.")
        if name == "num_hidden_layers" and isinstance(value, int) and value < 1:
            raise CheckpointError(f"{path}: {name} is {value}: a model has at least one; copy the model again.")


def _has_scale(name: str, names: Collection[str]) -> bool:
    part = name.removesuffix("weight")  # the last two: DeepSeek-V4's and Mistral Large's
    return any(
        scale in names for scale in (f"{name}_scale_inv", f"{name}_scale", f"{part}scale", f"{part}qscale_weight")
    )


def check_numbers(values: Any, where: str, advice: str = "correct config.json") -> None:
    """Raise CheckpointError, which begins with ``where`` and ends with ``advice``, for numbers that no model has.

    transformers builds such models, which then end in an overflow or answer nonsense.
    """
    for name, value in values.items() if isinstance(values, Mapping) else ():
        check_numbers(value, where, advice)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        likely = isinstance(value, float) or abs(value) <= MAX_INTEGER
        if re.search(r"(^|_)(eps|epsilon)$", str(name)):
            likely = 0 <= value < 1
        elif name in _ABOVE_0:
            likely = 0 < value < math.inf
        elif name in ("max_position_embeddings", "n_positions"):
            likely = 1 <= value <= MAX_INTEGER
        if not likely:
            raise CheckpointError(f"{where}: {name} is {value!r:.40}, which no model has; {advice}.")


def check_size(source: str, config: PretrainedConfig, trust_remote_code: bool) -> None:
    """Raise CheckpointError if a directory's config asks for far more weights than its files hold.

    transformers allocates the missing weights before it reports them.
    """
    if not os.path.isdir(source):
        return
    stored = sum(file.stat().st_size for file in Path(source).glob("*.safetensors"))
    with torch.device("meta"):
        planned = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    parameters = sum(parameter.numel() for parameter in planned.parameters())
    if parameters > 4 * stored:  # the smallest weights have 2 bits
        raise CheckpointError(
            f"{source}: config.json asks for {parameters:.3g} weights, but the files hold {stored:.3g} bytes; "
            "copy the model again."
        )


def mtp_names(names: Iterable[str], layers: int) -> list[str]:
    """Return the tensors of a checkpoint that belong to MTP layers, which follow the ``layers`` of the model.

    A later layer that joins no embedding with a state is the model's own, and its config counts too few.
    """
    candidates = [name for name in names if _is_mtp_name(name, layers)]
    numbers = {name: match[1] for name in candidates if (match := _LAYER.match(name))}
    joining = {number for name, number in numbers.items() if _JOINS.search(name)}
    return [name for name in candidates if name not in numbers or numbers[name] in joining]


def _is_mtp_name(name: str, layers: int) -> bool:
    if re.search(r"(^|\.)mtp(_\w+)?\.", name):
        return True
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= layers


def is_mtp_alone(names: Iterable[str], config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's tensors are MTP layers of a model with that config.json, and at most its tables.

    In NextN exports for SGLang their numbers begin at 0, and the config counts them as the model's layers.
    """
    text_config, rest = config.get("text_config"), [name for name in names if not _TABLE.search(name)]
    layers = (text_config if isinstance(text_config, dict) else config).get("num_hidden_layers")
    if any(name.endswith("layers.0.eh_proj.weight") for name in rest):
        layers = 0
    return bool(rest) and all(_is_mtp_name(name, layers if type(layers) is int else MAX_INTEGER) for name in rest)


def check_loaded(source: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise ModelLoadError if weights are missing or of other sizes; warn of weights that the model does not have."""
    missing, unused = (sorted(info[name]) for name in ("missing_keys", "unexpected_keys"))
    layers = len(getattr(model.get_decoder(), "layers", ()))
    of_mtp = set(mtp_names(unused, layers)) if layers else set()  # fsd_infer.drafters.mtp has them
    unused = [name for name in unused if name not in of_mtp]
    parameters = {name for name, _ in model.named_parameters()}  # of a module that the model lacks, nothing is taken
    unread = [name for name in unused if QUANTISED.search(name) and not name.endswith("zero_point")]
    if quantised := [name for name in unread if f"{name.rpartition('.')[0]}.weight" in parameters]:
        raise ModelLoadError(
            f"{source}: its weights are quantised, and transformers has not read their {quantised[0]!r}. If its "
            "config.json has no quantization_config, copy it there, with its quant_method, from the file where some "
            "programs keep it (quantize_config.json, quant_config.json); else use another checkpoint."
        )
    for name, stored, expected in sorted(info["mismatched_keys"]):
        advice = "Check that config.json belongs to these weights."
        if QUANTISED.search(name):
            advice = f"transformers {VERSION} does not read such weights: use others, as without zero points."
        raise ModelLoadError(
            f"{source}: {name} has the shape {list(stored)}, but {type(model).__name__} needs {list(expected)}. "
            f"{advice}"
        )
    if missing:
        raise ModelLoadError(
            f"the weights of {source} lack {len(missing)} tensors of {type(model).__name__}, first {missing[0]!r}; "
            "they would be random. Check that config.json belongs to these weights."
        )
    if unused:
        log.warning(
            "%d tensors of %s have no place in %s, first %r: check that config.json belongs to these weights.",
            len(unused), source, type(model).__name__, unused[0],
        )  # fmt: skip


def _check_windows(decoder: Any, config: Any) -> None:
    """Raise ModelLoadError for attention windows that this model applies to its cache and not to its masks.

    Then ``generate`` depends on where a prompt ends, and no mask of a draft tree agrees with it. Moshi is such a model.
    """
    shortest = min((window for window in layer_windows(config).values() if window is not None), default=None)
    module: Any = inspect.getmodule(type(decoder))
    ours = module is None or not module.__name__.startswith("transformers.models.")
    if shortest is None or ours or any("sliding_window" in name and "mask" in name for name in vars(module)):
        return
    if shortest < (max_positions(config) or float("inf")):
        raise ModelLoadError(
            f"{type(decoder).__name__} has a sliding window of {shortest} tokens, which transformers applies to its "
            "cache and not to its masks. Use another target, or load it with a sliding_window as long as its context."
        )


def _check_prompts_are_causal(config: Any) -> None:
    """Raise ModelLoadError for Doge where transformers leaves out its causal mask, so that prompts see what follows."""
    version = tuple(int(part) for part in VERSION.split(".")[:2])
    if config.model_type == "doge" and version < _DOGE_IS_CAUSAL and config._attn_implementation != "eager":
        raise ModelLoadError(
            f"transformers {VERSION} reads a prompt of Doge in both directions, so its answers depend "
            f'on where the prompt ends. Load it with attn_implementation="eager", or install transformers '
            f"{'.'.join(map(str, _DOGE_IS_CAUSAL))} or later."
        )


def _check_decoder(model: Any, decoder: Any) -> None:
    """Raise ModelLoadError for a decoder with an LM head of its own, or for a forward that always needs an image."""
    model_class = type(model).__name__
    if getattr(decoder, "get_output_embeddings", lambda: None)() is not None:
        raise ModelLoadError(f"{model_class} has a whole causal LM as its decoder. Use that one, or another target.")
    image = inspect.signature(model.forward).parameters.get("pixel_values")
    if image is not None and image.default is inspect.Parameter.empty:
        raise ModelLoadError(
            f"{model_class} needs an image at every forward, which decoding does not give. Use another target."
        )


def check_decodable(model: Any, name: str) -> None:
    """Raise ModelLoadError unless a model has an LM head, a causal decoder that takes positions, and one device."""
    check_image_model(model.config)
    model_class, decoder, config = type(model).__name__, model.get_decoder(), model.config.get_text_config(decoder=True)
    if model.get_output_embeddings() is None or getattr(model.config, "is_encoder_decoder", False):
        raise ModelLoadError(
            f"{model_class} has no language-model head, or an encoder: a causal LM is needed as target."
        )
    _check_windows(decoder, config)
    _check_prompts_are_causal(config)
    if decoder is model or decoder is None:
        raise ModelLoadError(f"{model_class} does not say which module is its decoder (`get_decoder`).")
    _check_decoder(model, decoder)
    if not isinstance(getattr(config, "num_hidden_layers", None), int):  # BLT: an encoder, a decoder, and more
        raise ModelLoadError(
            f"{model_class} has no num_hidden_layers in its config, so it is no single decoder. Use another target."
        )
    recurrent, types = read_trees(model), set(layer_types(config) or ())
    for layer in read_past_forward(model):
        stay_plain(layer)
    if not recurrent and types & RECURRENT:
        raise ModelLoadError(
            f"{model_class} has layers of type {', '.join(sorted(types & RECURRENT))}, but no code here that knows "
            "them: a token tree cannot be verified. Use another target."
        )
    parameters = {name for module in (model, decoder) for name in inspect.signature(module.forward).parameters}
    reads = "position_ids" in parameters and cache_argument(type(model)) in parameters
    attends = not recurrent or types - WITHOUT_KEYS
    if attends and not reads or getattr(config, "alibi", False) or _counts_its_cache(decoder):
        raise ModelLoadError(
            f"{model_class} takes no positions or no cache (it keeps a state, or counts its cache); verifying a token "
            "tree in one forward needs siblings at one position. Use another target."
        )
    _check_reading(model_class, config)
    _warn_foreign_eos(model, name)
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise ModelLoadError(
            f"{name} lies on several devices ({', '.join(sorted(devices))}), layer by layer, but a cache lies on one. "
            'Load it on one device, or by tp_plan="auto" on one per process (docs/performance.md).'
        )


def _counts_its_cache(decoder: Any) -> bool:
    """Whether its code derives positions from the length of the cache, as Inkling's and GLM-5.3's indexer do."""
    forwards = [inspect.unwrap(type(module).forward) for module in (decoder, *decoder.modules())]
    members = forwards[0].__globals__.values()  # of its module
    module_members = [member for member in members if getattr(member, "__module__", "") == type(decoder).__module__]
    codes = [set(member.__code__.co_names) for member in (*module_members, *forwards) if inspect.isfunction(member)]
    return any(names <= code for names in _CACHE_LENGTH_CALLS for code in codes)


def _warn_foreign_eos(model: Any, name: str) -> None:
    """Warn of EOS tokens that no answer can end with."""
    size = shape_of(model.get_output_embeddings())[0]
    foreign = sorted(token for token in eos_ids(model.generation_config) if not 0 <= token < size)
    if foreign:
        log.warning(
            "%s ends answers with token %s, which its vocabulary of %d lacks: correct eos_token_id in its config.",
            name, ", ".join(map(str, foreign)), size,
        )  # fmt: skip


def _check_reading(model_class: str, config: Any) -> None:
    """Raise ModelLoadError for a text config whose layers cannot verify a draft tree."""
    if getattr(config, "is_decoder", True) is False and config.model_type not in _CAUSAL_ANYWAY:
        raise ModelLoadError(
            f"{model_class} reads text in both directions, because its config has is_decoder=False: set it if the "
            "model was trained to continue text, or use another target."
        )
    if config._attn_implementation not in ("sdpa", "eager", None):
        raise ModelLoadError(
            f"{model_class} has the attention {config._attn_implementation!r}, which reads no masks of draft trees: "
            'load it with attn_implementation="sdpa" or "eager".'
        )
    if hasattr(config, "altup_num_inputs"):  # Gemma 3n
        raise ModelLoadError(
            f"{model_class}: its hidden states are of several streams, so no single feature enters its LM head. Use "
            "another target."
        )
    if (getattr(config, "n_recurrent_loops", None) or 1) > 1:  # Dory
        raise ModelLoadError(
            f"{model_class} runs layers {config.n_recurrent_loops} times over a text (n_recurrent_loops) and keeps "
            "keys and values of each time, but a cache here has room for one. Use another target."
        )
