"""Multi-token-prediction layers in the files of a target: their names in each layout, and their values.

transformers drops these tensors when it loads the target, so they are read from its files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import cached_file

from fsd_core.errors import ModelLoadError
from fsd_core.files import read_json
from fsd_infer.heads.mtp_layouts import OWN_DIRECTORY, Layout, family_layout, layout_of, separate_layout
from fsd_infer.heads.stored_parts import EMBEDDINGS, LM_HEAD
from fsd_infer.heads.weights import FLOATS, FP8, KINDS, Weights, has_weights, is_unused, scale_spans, times_scales
from fsd_infer.targets.checks import QUANTISED, is_mtp_alone, mtp_names
from fsd_infer.targets.target import Target

logger = logging.getLogger(__name__)
MTP_ADVICE = '. Fetch the checkpoint again, or name another drafter than "mtp".'


_SCALES = ("_scale_inv", "_scale")
_FIRST_LAYER = re.compile(r"((?:(?:model|language_model)\.)+)layers\.0\.")
_EXPERT = re.compile(r"(.*(?:mlp|mixer)\.experts)\.(gate_up|up|down)_proj$")


class MtpFiles:
    """The MTP layers in a target's files.

    Args:
        target: whose files hold the tensors.
        weights: the files of the target.
        names: names of the MTP tensors in them.
        layout: layout of their names.

    Attributes:
        names: names of the tensors.
        count: number of layers, as the config says, else as there are.

    Raises:
        ModelLoadError: a layout that is not read, or tensors that no layer has.
        CheckpointError: a damaged file.
    """

    def __init__(self, target: Target, weights: Weights, names: list[str], layout: Layout) -> None:
        self.target, self.weights, self.names, self.layout = target, weights, names, layout
        self._stored = dict[tuple[int | None, str], str]()
        for name in names:
            part = self.layout.part(name)
            if part is None:
                raise self._error(name, f"{name} has no place in the MTP layers of {target.config.model_type}")
            if part in self._stored:
                raise self._error(name, f"{name} and {self._stored[part]} are the same tensor")
            self._stored[part] = name
        # they follow the model's layers, or begin at 0 in files without the model
        numbers = {number for number, _ in self._stored if number is not None} or {0}
        first = self._first = min(_model_layers(target), max(numbers)) if layout.follows else 0
        there = max(numbers) + 1 - first
        named = there if layout.names is OWN_DIRECTORY else stated_layers(target) or there
        self.count = min(named, layout.most or named)
        if there > self.count:
            why = f"its config says {named}" if named < there else f"{self.count} is read in {target.config.model_type}"
            logger.warning(
                "%s has %d MTP layers in its files, and %s: those after are left out.", target.name, there, why
            )

    def _error(self, name: str, fault: str) -> ModelLoadError:
        files = self.weights.files
        file = files.get(name) or files[next(iter(self._stored.values()), name)]
        return ModelLoadError(f"{file}: {fault}{MTP_ADVICE}")

    def find(self, ours: str, layer: int) -> str | None:
        """Return the stored name of our ``ours`` of a layer, counted from 0; None if there is none."""
        return self._stored.get((self._first + layer, ours)) or self._stored.get((None, ours))

    def plan(self, layer: int, wanted: Mapping[str, Tensor]) -> dict[str, list[str]]:
        """Return the stored tensors of each parameter of a layer: one, or of each expert those to be joined.

        Args:
            layer: counted from 0.
            wanted: parameters by our names; only their shapes count.

        Raises:
            ModelLoadError: tensors are missing, unknown, quantised in a way that is not read, or of another shape.
        """
        for fault in self.faults(layer, wanted):
            raise fault
        return {
            ours: [str(self.find(part, layer)) for part, _ in self._parts(ours, value, layer)]
            for ours, value in wanted.items()
        }

    def faults(self, layer: int, wanted: Mapping[str, Tensor]) -> Iterator[ModelLoadError]:
        """Yield the errors that :meth:`plan` would raise, for all tensors. Arguments as there."""
        used = set()
        for ours, value in wanted.items():
            for part, shape in self._parts(ours, value, layer):
                used.add(part)
                try:
                    self._check(part, layer, shape)
                except ModelLoadError as fault:
                    yield fault
        known = used | {part + scale for part in used for scale in _SCALES} | {EMBEDDINGS, LM_HEAD}
        for (number, ours), name in self._stored.items():
            if number in (None, self._first + layer) and ours not in known and not is_unused(ours):
                yield self._error(name, f"{name} has no place in an MTP layer of {self.target.config.model_type}")

    def _parts(self, ours: str, value: Tensor, layer: int) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes of the tensors that hold a parameter: itself, or one of each expert."""
        return [(ours, tuple(value.shape))] if self.find(ours, layer) else _experts(ours, value)

    def _check(self, ours: str, layer: int, shape: tuple[int, ...]) -> None:
        name = self.find(ours, layer)
        if name is None:
            self._refuse_quantised(ours, layer)
            missing = self.layout.stored(ours, self._first + layer)
            raise self._error(missing, f"the MTP layer lacks the tensor {missing}")
        dtype, stored_shape = self.weights.dtypes[name], self.weights.shapes[name]
        if dtype not in KINDS[FLOATS] + KINDS[FP8]:
            raise self._quantised(name)
        if stored_shape != shape:
            raise self._error(name, f"{name} has the shape {list(stored_shape)}, but this target needs {list(shape)}")
        if dtype in KINDS[FP8]:
            self._scale(ours, layer, name)

    def _refuse_quantised(self, ours: str, layer: int) -> None:
        module = ours.rpartition(".")[0]
        for (number, other), name in self._stored.items():
            if number in (None, self._first + layer) and other.startswith(module) and QUANTISED.search(other):
                raise self._quantised(name)

    def _quantised(self, name: str) -> ModelLoadError:
        dtype = self.weights.dtypes[name]
        return self._error(
            name, f"the MTP layer is quantised ({name} of type {dtype}), and only fp8 with scales is read so"
        )

    def _scale(self, ours: str, layer: int, name: str) -> tuple[str, list[int]]:
        """Return the name of an fp8 tensor's scales, and how many rows and columns one of them covers."""
        scale = next(filter(None, (self.find(ours + end, layer) for end in _SCALES)), None)
        if scale is None:
            raise self._error(name, f"{name} is of type {self.weights.dtypes[name]} without {name}_scale_inv")
        blocks, shape, sizes = self._blocks, self.weights.shapes[name], self.weights.shapes[scale]
        if len(sizes) != len(shape):
            return scale, []
        spans = scale_spans(shape, sizes, [1] * (len(shape) - 2) + blocks)
        if spans is None:
            raise self._error(scale, f"{scale} has the shape {list(sizes)} for {list(shape)} in blocks of {blocks}")
        return scale, spans

    @cached_property
    def _blocks(self) -> list[int]:
        """Rows and columns that one scale of fp8 tensors covers; transformers drops it where it expands a target."""
        file = self.weights.directory / "config.json"
        config: Any = read_json(file, "Fetch the checkpoint again.") if file.is_file() else {}
        scheme = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
        return list(scheme.get("weight_block_size") or [128, 128])

    def value(self, name: str) -> Tensor:
        """Read a stored tensor; fp8 times its scales is float32."""
        if self.weights.dtypes[name] not in KINDS[FP8]:
            return self.weights.read(name)
        number, ours = self.layout.part(name) or (None, "")
        scale, spans = self._scale(ours, (number or self._first) - self._first, name)
        return times_scales(self.weights.read(name, FP8), self.weights.read(scale).float(), spans)

    def table(self, name: str) -> Tensor:
        """Read embeddings or an LM head [V, H]. Raises ModelLoadError for another shape."""
        expected = [self.target.vocab_size, self.target.hidden_size]
        if list(self.weights.shapes[name]) != expected:
            raise self._error(
                name, f"{name} has the shape {list(self.weights.shapes[name])}, but this target needs {expected}"
            )
        return self.value(name)

    def read(self, layer: int, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of a layer's parameters; arguments and errors as for :meth:`plan`."""
        result = {}
        for ours, names in self.plan(layer, wanted).items():
            values = [self.value(name) for name in names]
            result[ours] = values[0] if len(values) == 1 else torch.cat(values).view(wanted[ours].shape)
        return result


def _experts(ours: str, value: Tensor) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors of single experts that transformers' layers hold as one: gate_up_proj [E, 2I, H], down_proj."""
    match = _EXPERT.fullmatch(ours)
    if match is None:
        return [(ours, tuple(value.shape))]
    count, rows, columns = value.shape
    parts = ("gate", "up") if match[2] == "gate_up" else (match[2],)
    shape = rows // len(parts), columns
    return [(f"{match[1]}.{expert}.{part}_proj.weight", shape) for expert in range(count) for part in parts]


def find_mtp(target: Target, directory: Path | None = None) -> MtpFiles | None:
    """Find the MTP layers in the target's files, or in a directory of their own. None if there are none.

    Raises as :class:`MtpFiles`.
    """
    source = directory or files_of(target)
    if source is None:
        return None
    weights, first = Weights(source, expands=False), _model_layers(target)
    if directory is not None:
        file = directory / "config.json"
        config: Any = read_json(file, "Fetch the layers again.") if file.is_file() else {}
        of_mimo = target.config.model_type == "mimo" and "speculators_model_type" not in config  # the same names
        if any(name.startswith("mtp_layers.") for name in weights.shapes) and not of_mimo:
            return MtpFiles(target, weights, list(weights.shapes), separate_layout(target))
        first = 0 if is_mtp_alone(weights.shapes, config) else first
    names = mtp_names(weights.shapes, first)
    return MtpFiles(target, weights, names, layout_of(target, names[0])) if names else None


def in_own_layout(target: Target, state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return a layer's tensors, by our names, as the first MTP layer of the target's family, with single experts.

    Names begin as those of the model's own layers in its files do, as in checkpoints of models that see.

    Args:
        target: None is returned for one of a family without a layout.
        state: the projection reads [embedding ; state].
    """
    layout = family_layout(target)
    if layout is None:
        return None
    number, result, beginning = _model_layers(target) if layout.follows else 0, dict[str, Tensor](), _beginning(target)
    for ours, value in state.items():
        if ours == "eh_proj.weight" and layout.state_first:
            value = torch.cat(value.chunk(2, 1)[::-1], 1)
        names = [layout.stored(part, number) for part, _ in _experts(ours, value)]
        names = [beginning + name.removeprefix("model.") if name.startswith("model.") else name for name in names]
        parts = value.flatten(0, -2).chunk(len(names)) if len(names) > 1 else [value]
        result |= dict(zip(names, parts, strict=True))
    return result


def _beginning(target: Target) -> str:
    """Return the prefix of the names of the model's own layers in its files, "model." if there are none."""
    directory = files_of(target)
    names = [] if directory is None else list(Weights(directory).shapes)
    return next((match[1] for name in names if (match := _FIRST_LAYER.match(name))), "model.")


def stated_layers(target: Target) -> int | None:
    """Return how many MTP layers the target's config says that it has; None if it says none, or nothing."""
    counts = (getattr(target.config, name, None) for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


def _model_layers(target: Target) -> int:
    return len(getattr(target.decoder, "layers", ()))  # LongCat counts two in its config for each


def files_of(target: Target) -> Path | None:
    """Return the directory of the target's safetensors; None for a model made in memory, or of another format."""
    source = getattr(target.model, "name_or_path", "") or ""
    if not source:
        return None
    directory = Path(source)
    if not directory.is_dir():
        config = cached_file(source, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
        directory = Path(config).parent if config else directory
    return directory if directory.is_dir() and has_weights(directory) else None
