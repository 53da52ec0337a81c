"""Read facts and tensors of GGUF files by a memory map. A header of 50,000 tokens takes 0.1 s.

gguf-py's own reader creates several objects per token, which takes seconds.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from fsd_core.errors import ModelLoadError, foreign_errors

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
PARTS = "split.parts"  # how many files the facts and tensors are from; no key of files
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # as llama-gguf-split names the parts of a file

# Python 3.10 does not map this module to its distribution, and then transformers reads the version here
vars(gguf).setdefault("__version__", version("gguf"))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a GGUF file.

    Attributes:
        ggml_type: its tensor type.
        shape: in torch's order, the last dimension contiguous.
        data: [rows, bytes] uint8, a read-only view of the mapped file.
    """

    ggml_type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray

    def values(self) -> np.ndarray:
        """Return the values in fp32. Raises NotImplementedError for types that gguf-py does not support."""
        return np.array(dequantize(self.data, self.ggml_type), dtype=np.float32).reshape(self.shape)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Read a GGUF file's facts and its tensors, both by name; of a split file all parts, whichever is given.

    Raises:
        ModelLoadError: no GGUF file, truncated, or malformed, or a part of a file whose others are missing.
    """
    facts, tensors = _read_file(path)
    count, name = facts.get("split.count", 1), _PART.fullmatch(path.name)
    if count == 1 or name is None or int(name[3]) != count:
        return facts, tensors
    parts = [path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf") for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelLoadError(
            f"{path} is one of {count} parts, and {len(missing)} are missing, first {missing[0]}: put all into one "
            "directory."
        )
    read = [(facts, tensors) if part == path else _read_file(part) for part in parts]
    found = {name: tensor for _, of_part in read for name, tensor in of_part.items()}
    if len(found) != (expected := read[0][0].get("split.tensors.count", len(found))):
        raise ModelLoadError(f"the parts of {path} hold {len(found)} tensors instead of {expected}. Fetch them again.")
    return {**read[0][0], "split.count": 1, PARTS: count}, found


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    with foreign_errors(ModelLoadError, f"{path} is not a readable GGUF file ({{why}}); fetch it again."):
        return _GGUFReader(np.asarray(np.memmap(path, np.uint8, "r"))).read()


class _GGUFReader:
    """A cursor in a file's header."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.view, self.at = data, data.data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        if bytes(self.view[:4]) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        version, tensors, count = self._numbers("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}" if version % 65536 else "its numbers are big-endian")
        self._check(tensors)
        self._check(count)
        metadata: dict[str, Any] = {}
        for _ in range(count):
            (name,) = self._strings(1)
            if not name or name in metadata:
                raise ValueError(f"key {name!r:.80} is empty or there twice")
            metadata[name] = self._value(self._number("I"))
        listed = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & alignment - 1:
            raise ValueError(f"alignment {alignment!r:.40}, which is not a power of two")
        start = -(-self.at // alignment) * alignment
        return metadata, self._placed(listed, start, alignment)

    def _placed(
        self, listed: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, StoredTensor]:
        """Return the tensors by name. Raise ValueError for repeated names, and for tensors that overlap."""
        tensors: dict[str, StoredTensor] = {}
        ends, before = start, "the header"
        for name, sizes, ggml_type, at in sorted(listed, key=lambda tensor: tensor[3]):
            if name in tensors:
                raise ValueError(f"tensor {name!r:.80} is there twice")
            if at % alignment or start + at < ends:
                raise ValueError(
                    f"tensor {name!r:.80} lies at {at}, inside {before} or not at a multiple of {alignment}"
                )
            tensors[name] = self._stored(name, sizes, ggml_type, start + at)
            ends, before = start + at + tensors[name].data.size, repr(name)
        return {name: tensors[name] for name, _, _, _ in listed}

    def _numbers(self, form: str) -> tuple[Any, ...]:
        numbers = struct.unpack_from(form, self.view, self.at)
        self.at += struct.calcsize(form)
        return numbers

    def _number(self, form: str) -> Any:
        return self._numbers("<" + form)[0]

    def _check(self, count: int) -> None:
        """Raise ValueError if fewer than ``count`` bytes remain."""
        if count > len(self.data) - self.at:
            raise ValueError("it is cut or malformed")

    def _value(self, value_type: int) -> Any:
        if value_type == _STRING:
            return self._strings(1)[0]
        if value_type != _ARRAY:
            return self._number(_NUMBERS[value_type])
        of, count = self._numbers("<IQ")
        self._check(count)
        return self._strings(count) if of == _STRING else list(self._numbers(f"<{count}{_NUMBERS[of]}"))

    def _strings(self, count: int) -> list[str]:
        """Read ``count`` strings: a vocabulary has 50,000, so only the decoder is called per string."""
        size_at, view, at, strings = struct.Struct("<Q").unpack_from, self.view, self.at, []
        for _ in range(count):
            start = at + 8
            at = start + size_at(view, at)[0]
            strings.append(str(view[start:at], "utf-8"))
        self._check(at - self.at)
        self.at = at
        return strings

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        (name,), count = self._strings(1), self._number("I")
        if count > 4:
            raise ValueError(f"tensor {name!r:.80} has {count} dimensions")
        return (name, self._numbers(f"<{count}Q"), *self._numbers("<IQ"))

    def _stored(self, name: str, sizes: tuple[int, ...], ggml_type: int, at: int) -> StoredTensor:
        """The tensor [sizes], the first contiguous."""
        known_type = GGMLQuantizationType(ggml_type)
        block, size = GGML_QUANT_SIZES[known_type]
        if not sizes or not all(sizes) or sizes[0] % block:
            raise ValueError(f"tensor {name!r} of {known_type.name} has sizes {sizes}")
        row = sizes[0] // block * size
        end = at + row * prod(sizes[1:])
        if end > len(self.data):
            raise ValueError(f"tensor {name!r} ends at byte {end}, the file at {len(self.data)}")
        return StoredTensor(known_type, tuple(reversed(sizes)), self.data[at:end].reshape(-1, row))
