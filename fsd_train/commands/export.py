"""`fsd-train export`: write a checkpoint or head for ``fsd_infer`` or another engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from fsd_core.directories import replacing_directory
from fsd_core.errors import CheckpointError, DataError
from fsd_core.hub import is_hub_id, load_whole
from fsd_core.text.row_check import RowCheck
from fsd_infer.heads.export import ExportFacts, export_head
from fsd_infer.heads.formats import read_config
from fsd_infer.heads.head import EagleHead
from fsd_infer.heads.hub import find_head
from fsd_infer.heads.kinds import MTP, kind_of
from fsd_infer.heads.stored_parts import CONFIG
from fsd_infer.heads.weights import has_weights
from fsd_infer.targets.loading import load_config, resolve_target
from fsd_infer.targets.target import Target
from fsd_train.callbacks.export import check_output
from fsd_train.checkpoints import read_checkpoint
from fsd_train.commands.stitch import stitch_mtp
from fsd_train.data.answers import conclude, read_answers
from fsd_train.data.images import ImageReader
from fsd_train.models.block import BlockModule
from fsd_train.models.distillation import DistillationModule
from fsd_train.models.eagle import EagleModule
from fsd_train.models.lm import LMModule
from fsd_train.models.mtp import MtpModule
from fsd_train.models.slim import load_slim
from fsd_train.models.start import choose_draft_ids


def module_class(options: Mapping[str, Any]) -> type[DistillationModule]:
    """Return the class of a checkpoint's module, which only its options tell."""
    kind_by_option: dict[str, type[DistillationModule]] = {"drafter": LMModule, "new": MtpModule, "blocks": BlockModule}
    return next((kind for option, kind in kind_by_option.items() if option in options), EagleModule)


def load_module(checkpoint: str | Path, target_kwargs: dict[str, Any] | None = None) -> DistillationModule:
    """Load the module of a checkpoint; the target with its keywords and ``target_kwargs``.

    Raises CheckpointError if it is missing, truncated or foreign, or holds NaN.
    """
    state = read_checkpoint(checkpoint)
    if non_finite := [name for name, value in state["state_dict"].items() if not bool(value.isfinite().all())]:
        raise CheckpointError(
            f"{checkpoint} holds NaN or infinity in {len(non_finite)} tensors, first {non_finite[0]!r}: training went "
            "wrong. Give an earlier checkpoint."
        )
    options = state["hyper_parameters"]
    kind = module_class(options)
    weight_options = {name: options[name] for name in kind.of_weights if name in options}
    if "head" in weight_options:
        weight_options["head"] = kind.head_options_class(**weight_options["head"])
    weight_options["target_kwargs"] = {**(options.get("target_kwargs") or {}), **(target_kwargs or {})}
    # every kind allows a loss without feature term; the loss does not affect weights
    module = kind(options["target"], loss="kl_pq", **weight_options)
    if isinstance(module, MtpModule) and module.new:  # it would copy a layer of the target, which has none here
        module.head = module.new_head().float()
    module.configure_model()
    module.load_state_dict(state["state_dict"])  # with EMA these are the averaged weights
    return module


def target_facts(name: str) -> ExportFacts:
    """Collect the facts of a target for other formats; its weights are read only on demand."""
    directory = resolve_target(name)
    config = load_config(name)
    text = config.get_text_config(decoder=True)
    architectures = list(getattr(config, "architectures", None) or [])
    return ExportFacts(str(directory), architectures, int(text.num_hidden_layers), partial(_lm_head_rows, name))


def _lm_head_rows(name: str, ids: Tensor | None) -> Tensor:
    target = load_slim(name, torch.bfloat16) or Target.from_pretrained(name, dtype=torch.bfloat16, device="cpu")
    return target.lm_head_rows(ids)[0]


def main(args: argparse.Namespace) -> int:
    """Run `fsd-train export`."""
    if Path(args.source).is_dir() and kind_of(read_config(Path(args.source))) == MTP:
        _check_output(args)
        return _export_mtp(Path(args.source), args)
    if (args.draft_vocab_size is None) != (args.data is None):
        raise DataError("--draft-vocab-size and --data go together.")
    _check_output(args)
    head = None if args.source.endswith(".ckpt") else find_head(args.source)
    if head is not None or Path(args.source).is_dir():
        if head is None:
            kind = kind_of(read_config(Path(args.source))) if (Path(args.source) / CONFIG).is_file() else None
            why = "it has no config.json of one" if kind is None else f"that is one of kind {kind}"
            raise DataError(f"{args.source} is not an EAGLE head: {why}. Give such a head, or a .ckpt file.")
        if Path(args.output).resolve() == head.resolve():
            raise DataError(f"{args.output} is the source of the export. Give another directory.")
        return load_whole(args.source, lambda: _export_head(find_head(args.source) or head, args))
    module = load_module(args.source, args.target_kwargs)
    if args.data:
        if not isinstance(module, EagleModule):
            raise DataError(f"{args.source} holds no EAGLE head, which alone takes --draft-vocab-size. Omit it.")
        _choose_ids(module.head, module.target, args, module.always_drafted())
    if args.to == "target" and isinstance(module, MtpModule):
        with TemporaryDirectory() as draft:
            directory = module.export(draft)
            return _into_target(directory, args.target or module.target_name, args)
    if args.to is None or args.to == "speculators" and isinstance(module, (MtpModule, BlockModule)):
        with _replacing_output(args) as draft:
            module.export(draft, {"checkpoint": Path(args.source).name})
        return 0
    if isinstance(module, (MtpModule, BlockModule)):
        raise DataError(f"{args.source} holds no EAGLE head. Omit --to, or give --to speculators.")
    if not isinstance(module, EagleModule):
        raise DataError("a small LM is exported in Hugging Face's format, which every engine reads. Omit --to.")
    return _export_to(module.head, args.target or module.target_name, args)


def _check_output(args: argparse.Namespace) -> None:
    """Raise DataError for an output that the export would remove, and was not told to."""
    output = Path(args.output)
    check_output(output, or_model=args.to == "target")
    if Path(args.source).exists() and output.resolve() in Path(args.source).resolve().parents:
        raise DataError(f"{output} holds the source of the export. Give another directory.")
    if output.is_dir() and any(output.iterdir()) and not args.overwrite:
        raise DataError(f"{output} is there already: add --overwrite to replace it, or give another directory.")


@contextmanager
def _replacing_output(args: argparse.Namespace) -> Iterator[Path]:
    """Yield where to write the export, which then replaces the output, and print the output's name."""
    with replacing_directory(Path(args.output)) as draft:
        yield draft
    print(args.output, file=sys.stderr)


def record_of(training: Any) -> dict[str, Any]:
    """Return a head's free-form training record as a dict."""
    return training if isinstance(training, dict) else {}


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the training that a head's config records, or none."""
    return record_of(record_of(config.get("training")).get("hyperparameters"))


def target_of(directory: Path, given: str | None) -> str:
    """Return the target's name, as given or as the head's config has it. Raises DataError if neither does."""
    config = read_config(directory)
    name = given or options_of(config).get("target") or config.get("target_model")
    if not isinstance(name, str):
        raise DataError(f"{directory} does not name its target. Give --target.")
    return name


def _export_head(source: Path, args: argparse.Namespace) -> int:
    name = target_of(source, args.target)
    if args.data is None and args.to is not None:
        return _export_to(EagleHead.from_pretrained(source), name, args)
    kwargs = {**(options_of(read_config(source)).get("target_kwargs") or {}), **(args.target_kwargs or {})}
    target = Target.from_pretrained(name, dtype=torch.bfloat16, device="cpu", **kwargs)
    head = EagleHead.from_pretrained(source, target)
    if args.data:
        _choose_ids(head, target, args, target.eos_token_ids)
    if args.to is not None:
        return _export_to(head, name, args)
    head.config.target = target.fingerprint()
    with _replacing_output(args) as draft:
        head.save_pretrained(draft, torch.bfloat16)
    return 0


def _export_mtp(source: Path, args: argparse.Namespace) -> int:
    """Export an MTP layer in a directory of its own, which is in speculators' layout."""
    if args.to != "target" or args.data is not None:
        raise DataError(f"{source} is an MTP layer in speculators' layout. --to target puts it into its target.")
    config = record_of(read_config(source).get("speculators_config"))
    name = args.target or record_of(config.get("verifier")).get("name_or_path")
    if not isinstance(name, str):
        raise DataError(f"{source} does not name its target. Give --target.")
    return _into_target(source, name, args)


def _into_target(layer: Path, name: str, args: argparse.Namespace) -> int:
    directory, output = load_whole(name, lambda: _directory_of(name)), Path(args.output)
    if output.resolve() in (directory.resolve(), Path(args.source).resolve()):
        raise DataError(f"{output} is a source of the export. Give another directory.")
    if directory.resolve().is_relative_to(output.resolve()):
        raise DataError(f"{output} holds the target, which the export would remove. Give another directory.")
    with _replacing_output(args) as draft:
        stitch_mtp(layer, directory, draft)
    return 0


def _directory_of(name: str) -> Path:
    """The directory of a target's safetensors; those of the Hub are fetched."""
    directory = Path(resolve_target(name))
    if not directory.exists() and is_hub_id(name):
        directory = Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5"]))
    if not directory.is_dir() or not has_weights(directory):
        raise DataError(f"{name} has no safetensors that an MTP layer could go into. Give the target's checkpoint.")
    return directory


def _export_to(head: EagleHead, name: str, args: argparse.Namespace) -> int:
    if args.to == "target":
        raise DataError("an EAGLE head has no place in its target's checkpoint. Give another --to.")
    with _replacing_output(args) as draft:
        remarks = export_head(head, draft, args.to, target_facts(name))
        remarks = [remark.replace(str(draft), str(args.output)) for remark in remarks]
        for remark in remarks:
            print(f"{args.to}: {remark}", file=sys.stderr)
    return 0


def _choose_ids(head: EagleHead, target: Target, args: argparse.Namespace, always: list[int]) -> None:
    check = RowCheck(args.strict)
    answers, _ = read_answers(
        args.data, target.tokenizer, vocab_size=target.vocab_size, check=check, reader=ImageReader.of(target)
    )
    conclude(check, target.tokenizer)
    head.set_draft_ids(choose_draft_ids(answers.answer_counts(target.vocab_size), args.draft_vocab_size, always))
