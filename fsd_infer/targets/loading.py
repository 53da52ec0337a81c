"""Load a target: a built-in one, or a causal LM, for text, or text and images, from files that transformers reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import file_exists, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fsd_core.errors import CheckpointError, FsdError, ModelLoadError, UnknownNameError, shortened
from fsd_core.files import HUB_ID, HUB_OPTIONS, usable_name
from fsd_core.hub import HubError, check_mistyped, hub_fault, is_hub_id, load_whole
from fsd_core.text.control import set_control_tokens
from fsd_infer.targets.adapters import ADAPTER_CONFIG, add_adapter, base_of, is_adapter, read_adapter_config
from fsd_infer.targets.builtin import BUILTIN_TARGETS, builtin_adapter, builtin_dir, gguf_of, is_builtin, is_gguf
from fsd_infer.targets.checks import check_directory, check_loaded, check_numbers, check_size
from fsd_infer.targets.gptq import METHODS, load_expanded
from fsd_infer.targets.kinds import attention_for, auto_class
from fsd_infer.targets.placing import parse_device, parse_dtype, take_device
from fsd_infer.targets.precision import check_quantization, method_of, quantization_config
from fsd_infer.targets.weights import ReadsBlocks, readable_types

_OURS = {  # arguments of transformers that load_target sets itself
    "torch_dtype": "give dtype",
    "config": "load the model with transformers, change it, and pass the object",
    "use_safetensors": "other formats are not loaded, because they can run code",
    "output_loading_info": "leave it out",
    "ignore_mismatched_sizes": "weights of other sizes would be random",
    "load_in_4bit": 'give quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}',
    "load_in_8bit": 'give quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}',
}
Loaded = TypeVar("Loaded")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def adapter_of(name_or_dir: str | os.PathLike[str]) -> Path | None:
    """Return the directory of the LoRA adapter that ``name_or_dir`` names; None for a target without one."""
    name = os.fspath(name_or_dir)
    if is_builtin(name):
        return builtin_adapter(name)
    return Path(name).expanduser() if name and is_adapter(name) else None


def resolve_target(name_or_dir: str | os.PathLike[str], *, progress: bool = True, subfolder: str | None = None) -> str:
    """Return what transformers should load for ``name_or_dir``: a local directory, a GGUF file, or a hub id.

    An adapter resolves to its base model, which has the config and the tokenizer.

    Args:
        name_or_dir: as in :func:`load_target`.
        progress: report on stderr while a built-in target is fetched.
        subfolder: folder of a local directory that has the model.

    Raises:
        UnknownNameError: neither a built-in name, nor a directory, nor of the form owner/model.
        ModelLoadError: neither text nor a path, a directory without a model, or a built-in target that cannot be
            fetched.
        CheckpointError: a truncated or malformed safetensors file in the directory.
    """
    if not isinstance(name_or_dir, str | os.PathLike):
        raise ModelLoadError(f"a target is a name or a directory, got {name_or_dir!r}.")
    name = os.fspath(name_or_dir)
    if name:
        usable_name(name, "target")
    if is_builtin(name):
        return str(builtin_dir(name, progress=progress))
    directory = Path(os.path.expanduser(name))  # pathlib's expanduser raises an error for unknown users
    if name and is_adapter(directory):
        return _resolve_base(directory, progress)
    if is_gguf(name):
        return str(directory)
    if name and os.path.isdir(directory):
        directory = directory / (subfolder or "")
        check_directory(directory)
        return str(directory)
    if name.endswith(".gguf"):
        raise ModelLoadError(f"{name}: no such file. Give the path of a GGUF file, or another target.")
    if HUB_ID.fullmatch(name):
        return name
    raise UnknownNameError(
        f"{BUILTIN_TARGETS.unknown(name)} A target is one of these built-in names, an existing local model directory "
        "or GGUF file, or a hub id in the form owner/model."
    )


def _resolve_base(adapter: Path, progress: bool) -> str:
    base = base_of(adapter)
    if is_adapter(base):
        raise ModelLoadError(f"{adapter}: its base model {base} is an adapter too. Merge {base} into its base first.")
    try:
        return resolve_target(base, progress=progress)
    except FsdError as error:
        raise ModelLoadError(
            f"{adapter}: its base model {base!r} cannot be loaded; correct base_model_name_or_path in "
            f"{ADAPTER_CONFIG}. ({error})"
        ) from error


def load_config(name_or_dir: str | os.PathLike[str], **hub: Any) -> PretrainedConfig:
    """Load only a target's config; names, options of the hub and errors as in :func:`load_target`."""
    return from_files(name_or_dir, hub, _config)


def load_tokenizer(
    name_or_dir: str | os.PathLike[str], *, allow_control_tokens: bool = False, **hub: Any
) -> PreTrainedTokenizerBase | None:
    """Load only a target's tokenizer, as :func:`load_target` does; None for a local directory without one."""
    return from_files(name_or_dir, hub, partial(_tokenizer, allow_control_tokens=allow_control_tokens))


def from_files(
    name_or_dir: str | os.PathLike[str], keywords: dict[str, Any], read: Callable[..., Loaded], progress: bool = True
) -> Loaded:
    """Call a function on a target's files and return its result; damaged files of the Hub are fetched again.

    Args:
        name_or_dir: as in :func:`load_target`.
        keywords: those that say where the files lie are used, and the others ignored.
        read: called with what transformers loads, and with these keywords; errors become ours.
        progress: as in :func:`resolve_target`.
    """
    source, options = located(name_or_dir, keywords, progress)
    read = explained(name_or_dir, source)(read)
    return load_whole(source, lambda: read(source, **options), **options)


def located(
    name_or_dir: str | os.PathLike[str], keywords: dict[str, Any], progress: bool = True
) -> tuple[str, dict[str, Any]]:
    """Return what transformers loads, and those of the keywords that say where it lies."""
    options = {name: keywords[name] for name in HUB_OPTIONS if keywords.get(name) is not None}
    source = resolve_target(name_or_dir, progress=progress, subfolder=options.get("subfolder"))
    if is_hub_id(source):
        check_mistyped(source, **options)
    adapter = adapter_of(name_or_dir)
    if adapter is not None and (revision := read_adapter_config(adapter, unmerged=True).get("revision")):
        options.setdefault("revision", revision)  # of the base model
    if os.path.isdir(source):
        options.pop("subfolder", None)
    return source, options


@contextmanager
def explained(name_or_dir: str | os.PathLike[str], source: str = "") -> Iterator[None]:
    """Convert any error of transformers about a model's files, or of the Hub about ``source``, to one of ours."""
    name = os.fspath(name_or_dir)
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(
            f"the weights of {name} are truncated or malformed ({error}); fetch them again."
        ) from error
    except (FsdError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # a bad config can make any part of transformers fail, and its Rust parts panic
        says = hub_fault(error)
        if isinstance(says, FsdError):  # transformers takes it for a ValueError of its own
            raise says from error
        if says is not None:
            raise HubError(f"{source or name} {says}") from error
        builtin = ", ".join(BUILTIN_TARGETS.names())
        hint = f"A model is a built-in name ({builtin}), a local directory or a hub id."
        if os.path.exists(name):  # it was found
            hint = "Check its files and the options for loading it."
        if isinstance(error, ImportError):
            hint = "Install it; fsd-toolkit[quant] has torchao, bitsandbytes, compressed-tensors and quanto."
        raise ModelLoadError(f"model {name!r} cannot be loaded: {shortened(error).rstrip('.')}. {hint}") from error


def load_target(
    name_or_dir: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    progress: bool = True,
    reads_blocks: ReadsBlocks | None = None,
    allow_control_tokens: bool = False,
    **model_kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a target with transformers, unchanged, in eval mode and without gradients.

    A LoRA adapter is merged into the weights of its base model, so the target runs as fast as the base. If the base is
    quantised, the adapter stays unmerged, and peft computes it.

    Args:
        name_or_dir: a built-in name, a local directory (of a model or of a LoRA adapter), a GGUF file or a hub id.
            Weights must be safetensors or GGUF.
        dtype: data type of all weights that are not quantised (default: bf16).
        device: default: CUDA where available, else CPU.
        trust_remote_code: run the model's own Python code; if False, such models are refused.
        attn_implementation: default: ``attention_for(config)``.
        progress: say on stderr when a built-in target is being fetched.
        reads_blocks: which quantised weights of a GGUF file a backend computes with; in bf16, these stay as they are
            until it prepares the model (:func:`fsd_infer.targets.gguf.load_gguf`), and ``state_dict`` lacks them.
            None: all are expanded.
        allow_control_tokens: names of special tokens in messages become the tokens. By default they are text.
        model_kwargs: any other argument of transformers' ``from_pretrained``: ``quantization_config`` (an object, or a
            dict with its ``quant_method``), ``device_map``, and what says where the files lie, for config and tokenizer
            too: ``revision``, ``token``, ``cache_dir``, ``local_files_only``, ``force_download``, ``subfolder``.

    Returns:
        (model, tokenizer). The tokenizer is None for a local directory without one.

    Raises:
        UnknownNameError: see :func:`resolve_target`.
        CheckpointError: see :func:`resolve_target`.
        ModelLoadError: also for an error of transformers, for quantised weights that this device does not support, and
            for weights that do not fill the model.
    """
    for name in _OURS.keys() & model_kwargs.keys():
        raise ModelLoadError(f"{name} is not an argument for a target: {_OURS[name]}.")
    device, dtype = parse_device(take_device(device, model_kwargs)), parse_dtype(dtype)
    keeps_blocks = dtype == torch.bfloat16 and not model_kwargs and bool(readable_types(reads_blocks))
    gguf = gguf_of(name_or_dir, keeps_blocks, progress)
    if gguf is None:
        options = {"dtype": dtype, "attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
        return _load_files(name_or_dir, model_kwargs, options, device, allow_control_tokens, progress)
    if model_kwargs:
        names = ", ".join(model_kwargs)
        raise ModelLoadError(f"{name_or_dir} is a GGUF file, which {names} cannot be used with: leave them out.")
    from fsd_infer.targets.gguf import load_gguf  # imports gguf-py

    model: Any
    with explained(name_or_dir):
        model, tokenizer = load_gguf(gguf, dtype, attn_implementation, reads_blocks if keeps_blocks else None)
    model.requires_grad_(False).eval()
    if tokenizer is not None:
        set_control_tokens(tokenizer, allow_control_tokens)
    return model if keeps_blocks else model.to(device), tokenizer


def _load_files(
    name: str | os.PathLike[str],
    model_kwargs: dict[str, Any],
    own_options: dict[str, Any],
    device: torch.device,
    allow_control_tokens: bool,
    progress: bool,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a target by transformers, with its adapter, in eval mode and without gradients.

    Args:
        name, model_kwargs, allow_control_tokens, progress: see :func:`load_target`.
        own_options: its other options of transformers.
        device: to load on, unless ``model_kwargs`` place the model.
    """
    options = {option: value for option, value in model_kwargs.items() if option not in HUB_OPTIONS} | own_options
    adapter, placed = adapter_of(name), "device_map" in options or "tp_plan" in options
    read = partial(_load, options, device, allow_control_tokens, adapter)
    model, tokenizer, quantised = from_files(name, model_kwargs, read, progress)
    model.requires_grad_(False)
    if adapter is not None:  # outside the reading: its errors say nothing of the base's files
        add_adapter(model, adapter, merge=not quantised)
    return model.eval() if placed else model.eval().to(device), tokenizer


def _load(
    options: Mapping[str, Any],
    device: torch.device,
    allow_control_tokens: bool,
    adapter: Path | None,
    source: str,
    **where: Any,
) -> tuple[Any, PreTrainedTokenizerBase | None, bool]:
    """Load with transformers; return model, tokenizer, and whether the model is quantised.

    Args:
        options: transformers' options, :func:`load_target`'s own included.
        device: device to load a quantised model on, unless the options place it.
        allow_control_tokens: as in :func:`load_target`.
        adapter: directory of one that will be applied, merged or, to a quantised model, unmerged.
        source: what transformers loads.
        where: options that say where the files lie.
    """
    options = dict(options)
    where = {"revision": "main", **where, "trust_remote_code": options.pop("trust_remote_code")}
    config = _config(source, **where)
    check_size(source, config, where["trust_remote_code"])
    if "quantization_config" in options:
        options["quantization_config"] = quantization_config(options["quantization_config"])
    stored = getattr(config, "quantization_config", None) is not None
    quantised = stored or options.get("quantization_config") is not None
    if adapter is not None:
        read_adapter_config(adapter, unmerged=quantised)  # refused before the weights are read
    expanded = device.type == "cpu" and method_of(config) in METHODS
    if quantised:
        check_quantization(config if stored else options["quantization_config"], device, stored)
    if quantised and not expanded:
        options.setdefault("device_map", {"": str(device)})
    options["attn_implementation"] = options["attn_implementation"] or attention_for(config)
    loaded: Any
    if expanded:
        loaded = load_expanded(source, config, where, **options)
    else:
        loaded = auto_class(config).from_pretrained(
            source, config=config, use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_loaded refuses them, by name
            **where, **options,
        )  # fmt: skip
    tokenizer = _tokenizer(source, allow_control_tokens, **where)
    model, info = loaded
    check_loaded(source, model, info)
    return model, tokenizer, quantised


def _config(source: str, **options: Any) -> PretrainedConfig:
    if is_gguf(source):
        from fsd_infer.targets.gguf import load_gguf_config

        return load_gguf_config(Path(source))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(source, **options)
    except ValueError:  # what transformers says where config.json is missing, too
        _refuse_hub_adapter(source, options)
        raise
    check_numbers(config.to_dict(), source)
    return config


def _refuse_hub_adapter(source: str, options: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for an adapter on the Hub."""
    revision, cache = options.get("revision"), options.get("cache_dir")
    if not is_hub_id(source) or options.get("local_files_only"):
        return
    if isinstance(try_to_load_from_cache(source, "config.json", cache, revision), str):
        return  # not only an adapter
    if file_exists(source, ADAPTER_CONFIG, revision=revision, token=options.get("token")):
        raise ModelLoadError(
            f"{source} is an adapter, and those are read from directories: fetch it (hf download {source} --local-dir "
            "DIR) and give DIR."
        )


def _tokenizer(source: str, allow_control_tokens: bool, **options: Any) -> PreTrainedTokenizerBase | None:
    directory = Path(source)
    if is_gguf(source):
        from fsd_infer.targets.gguf_tokenizer import load_gguf_tokenizer

        loaded = load_gguf_tokenizer(directory)
        set_control_tokens(loaded, allow_control_tokens)
        return loaded
    if directory.is_dir() and not any((directory / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:
        if not directory.is_dir():
            raise
        names = ", ".join(file for file in _TOKENIZER_FILES if (directory / file).is_file())
        raise ModelLoadError(
            f"the tokenizer of {source} cannot be loaded: {shortened(error)} Check its files: {names}."
        ) from error
    set_control_tokens(tokenizer, allow_control_tokens)
    tokenizer.decode(tokenizer("the")["input_ids"])  # a malformed tokenizer may load, and fail at every request
    return tokenizer
