"""Load a target's processor, which makes the pixels and the placeholder tokens of images."""

from __future__ import annotations

import os
from functools import partial, wraps
from pathlib import Path
from typing import Any

from transformers import PROCESSOR_MAPPING, AutoProcessor, ProcessorMixin

from fsd_core.errors import ModelLoadError
from fsd_infer.targets.loading import from_files, load_config

_FILES = ("processor_config.json", "preprocessor_config.json")


def load_processor(name_or_dir: str | os.PathLike[str], tokenizer: Any, **hub: Any) -> Any:
    """Load a target's processor, with the tokenizer that the target has; names and options as in ``load_target``.

    Raises:
        ModelLoadError: the target has none, or it needs a package that is missing.
    """
    processor = from_files(name_or_dir, hub, partial(_processor, name_or_dir, load_config(name_or_dir, **hub)))
    if not is_processor(processor):  # AutoProcessor returns a tokenizer, or only an image processor
        raise ModelLoadError(f"{name_or_dir} has no processor of text and images, so it reads no images.")
    processor.tokenizer = tokenizer
    return processor


def _processor(name: str | os.PathLike[str], config: Any, source: str, **where: Any) -> Any:
    if os.path.isdir(source) and not any((Path(source) / file).is_file() for file in _FILES):
        raise ModelLoadError(f"{name} has no processor ({' or '.join(_FILES)}), so it reads no images: add it.")
    try:
        return AutoProcessor.from_pretrained(source, **where)
    except (ImportError, OSError):  # no torchvision, or no config for videos, which no prompt here has
        processor_class: Any = PROCESSOR_MAPPING.get(type(config), None)
        if processor_class is None or "video_processor" not in processor_class.get_attributes():
            raise
        return without_others(processor_class).from_pretrained(source, **where)


def is_processor(value: Any) -> bool:
    """Whether an object is a processor of text and images."""
    return hasattr(value, "image_processor") and hasattr(value, "tokenizer")


def without_others(processor_class: type[ProcessorMixin]) -> Any:
    """Return a processor class without its parts for videos and sounds, of which the former need torchvision."""
    names = processor_class.get_attributes()
    kept = [name for name in names if name in ("image_processor", "tokenizer")]

    class ImagesAlone(ProcessorMixin):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{name: x for name, x in options.items() if name in kept or name not in names})

    class Seeing(processor_class, ImagesAlone):  # type: ignore[misc, valid-type]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return kept

        @wraps(processor_class.__init__)  # type: ignore[misc]  # its signature says what a saved processor holds
        def __init__(self, *args: Any, **options: Any) -> None:
            missing = {name: None for name in names if name not in kept}
            super().__init__(**missing, **dict(zip(kept, args)), **options)

    Seeing.__name__ = processor_class.__name__  # by which transformers finds its options
    return Seeing
