"""Convert GGUF files to 16-bit weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants

from benchmarks.write_gguf import finish

TYPES = {
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
}


def converted(source: Path, name: str, target: Path) -> Path:
    """Write ``source`` to ``target`` with matrices of the type ``name``, unless it exists. Return the path."""
    if target.is_file():
        return target
    kind, file_type = TYPES[name]
    reader = GGUFReader(source)
    fields: Any = reader.fields
    partial = target.with_name(target.name + ".partial")
    writer = GGUFWriter(partial, fields["general.architecture"].contents())
    for key, field in fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        numbers = quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type == GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, numbers)
        else:
            writer.add_tensor(tensor.name, quants.quantize(numbers, kind), raw_dtype=kind)
    finish(writer)
    partial.replace(target)
    return target
