"""Make targets with quantised weights, by libraries at load or from checkpoints in the formats of other programs.

The checkpoints are rounded to nearest. They serve to measure how such weights are read and computed, not how good this
rounding is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fsd_infer.targets.loading import load_target
from fsd_infer.targets.target import Target

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 32


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Pack whole numbers [n, ...] from 0 up into int32 [n · bits / 32, ...], the first in the lowest bits."""
    many = 32 // bits
    parts = numbers.long().view(len(numbers) // many, many, *numbers.shape[1:])
    joined = sum((parts[:, place] << (bits * place) for place in range(many)), start=torch.zeros_like(parts[:, 0]))
    return torch.where(joined < 2**31, joined, joined - 2**32).to(torch.int32)


def rounded(weight: Tensor, bits: int, group: int | None) -> tuple[Tensor, Tensor]:
    """Round a weight [out, in] to whole numbers [out, in] with scales [out, groups]."""
    most = 2 ** (bits - 1) - 1
    groups = weight.reshape(len(weight), -1, group or weight.shape[1])
    scales = (groups.abs().amax(-1) / most).clamp_min(1e-6).half().float()
    return (groups / scales[..., None]).round().clamp(-most - 1, most).view_as(weight).int(), scales


def _packed_integers(bits: int, group: int | None) -> Callable[[Tensor], dict[str, Tensor]]:
    def parts(weight: Tensor) -> dict[str, Tensor]:
        numbers, scales = rounded(weight, bits, group)
        whole = packed((numbers + 2 ** (bits - 1)).t(), bits).t()
        return {"weight_packed": whole, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}

    return parts


def _integers(weight: Tensor) -> dict[str, Tensor]:
    numbers, scales = rounded(weight, 8, None)
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}


def _fp8(weight: Tensor) -> dict[str, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 448).clamp_min(1e-6)
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def _codes(weight: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight [out, in] to codes [in, out], with scales and zeros [groups, out]."""
    groups, most = weight.reshape(len(weight), -1, GROUP), 2**bits - 1
    if symmetric:
        numbers, scales = rounded(weight, bits, GROUP)
        return (numbers + 2 ** (bits - 1)).t(), scales.t(), torch.full_like(scales.t(), 2 ** (bits - 1)).int()
    least, largest = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scales = ((largest - least) / most).clamp_min(1e-6).half().float()
    zeros = (-least / scales).round().clamp(0, most)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    return codes.view_as(weight).t().int(), scales.t(), zeros.t().int()


def _gptq(bits: int, symmetric: bool) -> Callable[[Tensor], dict[str, Tensor]]:
    def parts(weight: Tensor) -> dict[str, Tensor]:
        codes, scales, zeros = _codes(weight, bits, symmetric)
        stored = packed((zeros - 1).t() % 2**bits, bits).t()  # the format stores one less
        groups = torch.arange(len(codes)).int() // GROUP
        return {"qweight": packed(codes, bits), "qzeros": stored, "scales": scales.half(), "g_idx": groups}

    return parts


def _awq(weight: Tensor) -> dict[str, Tensor]:
    codes, scales, zeros = _codes(weight, 4, symmetric=False)
    order = (torch.arange(len(weight)).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]]).flatten()
    words = {name: packed(each[:, order].t(), 4).t() for name, each in (("qweight", codes), ("qzeros", zeros))}
    return {**words, "scales": scales.half()}


def _grouped(method: str, bits: int, symmetric: bool) -> dict[str, Any]:
    form = {"checkpoint_format": "gptq"} if method == "gptq" else {"version": "gemm", "zero_point": not symmetric}
    return {"quant_method": method, "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": False, **form}


def _compressed(form: str, bits: int, kind: str = "int", group: int | None = None, inputs: bool = False) -> Any:
    numbers = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
    of_weights = {**numbers, "strategy": "group" if group else "channel", "group_size": group}
    of_inputs = {**numbers, "dynamic": True, "strategy": "token"} if inputs else None
    scheme = {"targets": ["Linear"], "weights": of_weights, "input_activations": of_inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": scheme},
    }  # fmt: skip


STORED: Mapping[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "compressed-tensors W8A16": (_packed_integers(8, None), _compressed("pack-quantized", 8)),
    "compressed-tensors W4A16": (_packed_integers(4, GROUP), _compressed("pack-quantized", 4, group=GROUP)),
    "compressed-tensors W8A8": (_integers, _compressed("int-quantized", 8, inputs=True)),
    "compressed-tensors FP8": (_fp8, _compressed("float-quantized", 8, "float", inputs=True)),
    "gptq int4": (_gptq(4, True), _grouped("gptq", 4, True)),
    "gptq int4 with zeros": (_gptq(4, False), _grouped("gptq", 4, False)),
    "gptq int8": (_gptq(8, True), _grouped("gptq", 8, True)),
    "awq int4": (_awq, _grouped("awq", 4, False)),
}


def write(model: Any, directory: Path, kind: str) -> Path:
    """Write a Llama-like model with its decoder's linear layers quantised as ``kind`` of :data:`STORED`."""
    parts, quantization = STORED[kind]
    state: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        layer, _, name = key.rpartition(".")
        if name == "weight" and layer.rpartition(".")[2] in LINEAR:
            state |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts(value.float()).items()}
        elif not (key == "lm_head.weight" and model.config.tie_word_embeddings):
            state[key] = value.contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_dict(), "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config, default=str))
    return directory


def torchao(kind: str, **options: Any) -> Callable[[], Any]:
    """Return a function that makes a config of torchao's. Options are functions of the library."""

    def made() -> Any:
        import torchao.quantization as library
        from transformers import TorchAoConfig

        return TorchAoConfig(getattr(library, kind)(**{key: value(library) for key, value in options.items()}))

    return made


AT_LOAD: dict[str, Callable[[], Any]] = {
    "plain": lambda: None,
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao int8 dynamic": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao int4": torchao(
        "IntxWeightOnlyConfig", weight_dtype=lambda _: torch.int4, granularity=lambda library: library.PerGroup(32)
    ),
    "bitsandbytes nf4": lambda: {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes int8": lambda: {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "quanto int8": lambda: {"quant_method": "quanto", "weights": "int8"},
    "quanto int4": lambda: {"quant_method": "quanto", "weights": "int4"},
}


def load(source: str, kind: str, dtype: torch.dtype, scratch: Path) -> Target:
    """Load the unquantised model ``source`` as a target of this kind. Raises what the kind's library raises."""
    if kind in STORED:
        directory = scratch / kind.replace(" ", "-")
        if not directory.is_dir():
            write(load_target(source, dtype=torch.float32, device="cpu")[0], directory, kind)
        return Target.from_pretrained(str(directory), dtype=dtype, device="cpu")
    config = AT_LOAD[kind]()
    return Target.from_pretrained(
        source, dtype=dtype, device="cpu", **({} if config is None else {"quantization_config": config})
    )
