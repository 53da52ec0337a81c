"""Weights of a head on disk: one safetensors file, or several with an index. Values are read on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from fsd_core.errors import CheckpointError, VocabularyMismatchError
from fsd_core.files import open_safetensors, read_weight_map
from fsd_infer.targets.checks import QUANTISED, ROUNDINGS

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target

SINGLE, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
MEDUSA_FILE = "medusa_lm_head.safetensors"  # for text-generation-inference, perhaps next to a target's own files
AGAIN = "Copy or export the drafter again."
FLOATS, INTEGERS, BOOLEANS = "floating-point numbers", "whole numbers", "booleans"
FP8 = "numbers of 8 bits"
KINDS = {
    FLOATS: ("F64", "F32", "F16", "BF16"),
    INTEGERS: ("I64", "I32", "I16", "I8", "U8"),
    BOOLEANS: ("BOOL", "I64", "I32", "I16", "I8", "U8"),
    FP8: ("F8_E4M3", "F8_E5M2"),
}


SCALES = ("_scale_inv", "_scale", "_scale_2")  # ends of names
# numbers of nvfp4: a sign, two bits of exponent, one of mantissa
E2M1 = torch.tensor([sign * value for sign in (1, -1) for value in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)])


class Weights:
    """The safetensors files of a directory.

    Args:
        directory: directory of the head.
        ours: our name of a stored one; the same unless given.
        single: name of a file with all tensors; it need not exist if there is an index.
        expands: whether fp8 and nvfp4 weights are read as their products with their scales, which have no names then.

    Attributes:
        shapes: shape of each tensor, by our name.
        dtypes: safetensors' name of its type.
        files: where it lies.
        stored: its name there.
        finite: whether NaN and infinite numbers are refused.

    Raises:
        CheckpointError: there are no such files, one is damaged or lies in another directory, or two tensors have the
            same name of ours.
    """

    def __init__(
        self, directory: Path, ours: Callable[[str], str] = str, single: str = SINGLE, expands: bool = True
    ) -> None:
        self.directory, self._single, self.finite = directory, single, True
        self.stored: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.files: dict[str, Path] = {}
        for file in self._paths():
            if not file.is_file():
                raise CheckpointError(f"{file.parent} has no {file.name}: it is not a complete head checkpoint.")
            with open_safetensors(file, AGAIN) as opened:
                for stored in opened.keys():
                    tensor, name = opened.get_slice(stored), ours(stored)
                    if self.stored.setdefault(name, stored) != stored:
                        raise CheckpointError(f"{file}: {self.stored[name]} and {stored} are the same tensor. {AGAIN}")
                    self.shapes[name], self.dtypes[name] = tuple(tensor.get_shape()), str(tensor.get_dtype())
                    self.files[name] = file
        self._scales = dict(self._take_scales() if expands else ())

    def _take_scales(self) -> Iterator[tuple[str, list[str]]]:
        """Yield quantised weights and the names of their scales. Packed weights get their own shape."""
        for name, shape in list(self.shapes.items()):
            dtype = self.dtypes[name]
            scales = [name + end for end in SCALES if name + end in self.dtypes]
            packed = dtype == "U8" and scales == [f"{name}_scale", f"{name}_scale_2"]
            if len(shape) == 2 and (packed or dtype in KINDS[FP8] and len(scales) == 1):
                yield name, scales
                for scale in scales:
                    del self.shapes[scale]
                self.shapes[name] = (shape[0], shape[1] * (1 + packed))

    def _paths(self) -> list[Path]:
        single, index = self.directory / self._single, self.directory / INDEX
        if single.exists() or not index.exists():
            return [single]
        return [self.directory / name for name in sorted(set(read_weight_map(index, AGAIN).values()))]

    def read(self, name: str, wanted: str = FLOATS) -> Tensor:
        """Read a tensor. Raises CheckpointError unless it is of the wanted kind: FLOATS, INTEGERS, BOOLEANS or FP8."""
        if wanted == FLOATS and name in self._scales:
            return self._checked(name, self._expanded(name))
        if self.dtypes[name] not in KINDS[wanted]:
            if wanted == FLOATS:
                self.refuse_quantised(self.stored[name])
            raise CheckpointError(
                f"{self.files[name]}: {self.stored[name]} is of type {self.dtypes[name]}, not {wanted}. {AGAIN}"
            )
        return self._checked(name, self._stored(name)) if wanted == FLOATS else self._stored(name)

    def _stored(self, name: str) -> Tensor:
        with open_safetensors(self.files[name], AGAIN) as file:
            tensor: Tensor = file.get_tensor(self.stored[name])
        return tensor

    def _expanded(self, name: str) -> Tensor:
        weight, (scale, *factors) = self._stored(name), [self._stored(part).float() for part in self._scales[name]]
        if weight.dtype == torch.uint8:
            weight = E2M1[torch.stack([weight & 15, weight >> 4], -1).flatten(-2).long()]
            scale = scale * factors[0]
        if scale.numel() == 1:
            return times_scales(weight, scale.flatten(), [])
        shape = [size for size in scale.shape if size > 1] if scale.dim() > 2 else list(scale.shape)
        shape = shape if len(shape) == 2 else [*shape, 1]
        spans = scale_spans(weight.shape, shape, [16 if factors else 128] * 2) if len(shape) == 2 else None
        if spans is None:
            raise CheckpointError(
                f"{self.files[name]}: scales {list(scale.shape)} do not fit {self.stored[name]}, "
                f"{list(weight.shape)}. {AGAIN}"
            )
        return times_scales(weight, scale.reshape(shape), spans)

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        # with such numbers decoding stays exact, but no draft is ever accepted
        if self.finite and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{self.files[name]}: {self.stored[name]} holds NaN or infinite numbers. {AGAIN}")
        return tensor

    def refuse_quantised(self, stored: str) -> NoReturn:
        """Raise CheckpointError because this tensor is part of a quantised weight."""
        raise CheckpointError(
            f"{self.directory} is a quantised head ({stored}), and only fp8 with scales and nvfp4 are read so: use the "
            "checkpoint in bf16 or fp16 that it was made from."
        )


def scale_spans(shape: Sequence[int], scale_shape: Sequence[int], blocks: Sequence[int]) -> list[int] | None:
    """Return how many numbers along each dimension one scale covers; None if the scales are of another shape.

    Args:
        shape: of the weight.
        scale_shape: of its scales, as many dimensions: along each one scale for all, for each, or for a block.
        blocks: sizes of blocks.
    """
    spans = [
        1 if count == size else size if count == 1 else block
        for size, count, block in zip(shape, scale_shape, blocks, strict=True)
    ]
    fits = all(-(-size // span) == count for size, count, span in zip(shape, scale_shape, spans, strict=True))
    return spans if fits else None


def times_scales(weight: Tensor, scales: Tensor, spans: Sequence[int]) -> Tensor:
    """Return a weight times its scales in fp32. spans: :func:`scale_spans`; [] for scales that broadcast."""
    for dim, span in enumerate(spans):
        scales = scales.repeat_interleave(span, dim).narrow(dim, 0, weight.shape[dim])
    return weight.float() * scales


def fill(module: nn.Module, weights: Weights, names: Mapping[str, str], dtype: torch.dtype) -> None:
    """Load a module on the device "meta" from files.

    Args:
        module: whose parameters are read, converted and frozen.
        weights: the files.
        names: stored name of each of the module's tensors.
        dtype: data type of the parameters.

    Raises:
        CheckpointError: missing or further tensors, or wrong shapes.
    """
    state = read_state(weights, names, module.state_dict())
    module.load_state_dict({name: value.to(dtype) for name, value in state.items()}, assign=True)
    module.eval().requires_grad_(False)


def read_state(weights: Weights, names: Mapping[str, str], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return stored tensors under our names.

    Raises CheckpointError unless names and shapes are those of ``wanted``, and all numbers finite.

    Args:
        weights: the files.
        names: stored name of each tensor.
        wanted: tensors; only their shapes are used.
    """
    shapes = {name: tuple(value.shape) for name, value in wanted.items()}
    missing, surplus = shapes.keys() - names.keys(), names.keys() - shapes.keys()
    wrong = [name for name in shapes.keys() - missing if weights.shapes[names[name]] != shapes[name]]
    if missing or surplus or wrong:
        if scales := sorted(name for name in weights.stored.values() if QUANTISED.search(name)):
            weights.refuse_quantised(scales[0])
        raise CheckpointError(
            f"the weights in {weights.directory} do not fit its config.json: missing {sorted(missing)}, unexpected "
            f"{sorted(surplus)}, wrong shape {sorted(wrong)}."
        )
    return {name: weights.read(names[name]) for name in shapes}


def check_sizes(what: str, size: int, vocabulary: int, target: Target) -> None:
    """Raise CheckpointError or VocabularyMismatchError for a head whose features or vocabulary are not the target's.

    Args:
        what: the head, for errors.
        size: width of the features that it reads.
        vocabulary: number of ids that it drafts over.
        target: the model to draft for.
    """
    if size != target.hidden_size:
        raise CheckpointError(f"{what} is for {size} features, and {target.name} has {target.hidden_size}.")
    if vocabulary != target.vocab_size:
        raise VocabularyMismatchError(
            f"{what} drafts over {vocabulary} tokens, and {target.name} has {target.vocab_size}. Use a head for it."
        )


@contextmanager
def naming(directory: Path) -> Iterator[None]:
    """Name a head's directory in each CheckpointError raised within the block that does not name it."""
    try:
        yield
    except CheckpointError as error:
        if str(directory) in str(error):
            raise
        raise CheckpointError(f"{directory}: {error}") from error


def is_unused(name: str) -> bool:
    """Whether a tensor changes nothing: a buffer of old attention modules, or a scale of rounded activations."""
    return name.endswith("rotary_emb.inv_freq") or ROUNDINGS.fullmatch(name) is not None


def has_weights(directory: Path) -> bool:
    """Whether the directory has a safetensors file or an index."""
    return any((directory / name).exists() for name in (SINGLE, INDEX))


def names_in_pickle(pickled: Path, telling: tuple[str, ...]) -> set[str]:
    """Return which of these names a file of torch.save holds, found as plain text at its start, without unpickling."""
    if not pickled.is_file():
        return set()
    with pickled.open("rb") as file:
        start = file.read(1 << 20)
    return {name for name in telling if b"X" + len(name).to_bytes(4, "little") + name.encode() in start}
