"""`fsd-train publish`: check a head with its target, show its model card, and upload both to the Hub."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData, try_to_load_from_cache

from fsd_core.errors import CheckpointError, DataError
from fsd_core.hub import hub_errors, is_hub_id
from fsd_core.text.encoding import read_prompts
from fsd_core.text.row_check import RowCheck
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import EagleDrafter, TreeShape
from fsd_infer.heads.export import obstacle
from fsd_infer.heads.formats import CONFIG, OLD, OURS, head_kind, read_config
from fsd_infer.heads.head import EagleHead
from fsd_infer.heads.weights import INDEX, SINGLE
from fsd_infer.targets.loading import BUILTIN_TARGETS, is_builtin
from fsd_infer.targets.target import Target
from fsd_train.commands.export import record_of, target_of
from fsd_train.repository import find

TEMPLATE = Path(__file__).with_name("card.md.in")
LEAST_TAU = 1.05  # acceptance length below which hardly any draft is accepted


def main(args: argparse.Namespace) -> int:
    """Run `fsd-train publish`. The exit status is 1 if the user declines the upload."""
    directory = Path(args.directory)
    kind = head_kind(directory)
    if kind in (None, OLD):
        found = "no head" if kind is None else "a head in the format of an earlier version"
        raise DataError(f"{directory} is {found}. Write it with `fsd-train export` first.")
    name = args.target or target_of(read_config(directory))
    if name is None:
        raise DataError(f"{directory} does not name its target. Give --target.")
    target = Target.from_pretrained(name)
    head = EagleHead.from_pretrained(directory, target, dtype=target.dtype)
    card = card_of(head, target, kind == OURS, measured(head, target, args), args)
    print(card.content)
    files = [file for file in (CONFIG, SINGLE, INDEX) if (directory / file).is_file()]
    files += sorted(file.name for file in directory.glob("model-*.safetensors"))
    print(f"\n{args.repository}: README.md (above), {', '.join(files)} of {directory}", file=sys.stderr)
    if not args.yes:
        if not sys.stdin.isatty():
            raise DataError("no terminal to ask for confirmation. Check the card above, and give --yes to upload.")
        if input(f"Upload these to {args.repository}? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    print(upload(args.repository, directory, files, card, args), file=sys.stderr)
    return 0


def upload(repository: str, directory: Path, files: Sequence[str], card: ModelCard, args: argparse.Namespace) -> str:
    """Commit the files and the card to a repository, created if missing; return the commit's address."""
    config = json.dumps(without_paths(read_config(directory)), indent=2).encode()
    added = [CommitOperationAdd(file, config if file == CONFIG else str(directory / file)) for file in files]
    added.append(CommitOperationAdd("README.md", str(card).encode()))
    with hub_errors(repository, args.revision):
        api = HfApi()
        api.create_repo(repository, private=args.private or None, exist_ok=True)
        message = f"Draft head for {card.data.get('base_model') or 'speculative decoding'}"
        return str(api.create_commit(repository, added, commit_message=message, revision=args.revision).commit_url)


def without_paths(value: Any) -> Any:
    """Reduce absolute paths in a JSON value to their last part, to publish nothing about the machine."""
    if isinstance(value, dict):
        return {key: without_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_paths(each) for each in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def measured(head: EagleHead, target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the acceptance length of exact, greedy decoding. Raises CheckpointError if it is near 1."""
    shape = TreeShape.parse(args.tree)
    source = find(args.prompts)
    if not source.exists():
        raise DataError(f"{args.prompts} is missing. Give prompts for the measurement as --prompts.")
    check = RowCheck(args.strict)
    prompts: list[Any] = [row.messages for row in check.first(read_prompts(source, check), args.limit)]
    check.finish()
    if not prompts:
        raise DataError(f"{source} holds no prompts. Give others as --prompts.")
    decoder = FuzzyDecoder(target, EagleDrafter(head, target, shape))
    tau = decoder.generate(prompts, max_new_tokens=args.max_new_tokens, do_sample=False).stats.tau
    if not tau >= LEAST_TAU:
        raise CheckpointError(
            f"{args.directory} has an acceptance length of {tau:.2f} with {target.name}, where 1 means no draft. "
            "Run `fsd-train doctor`."
        )
    return {"tau": tau, "shape": shape, "prompts": f"{len(prompts)} of {source.name}", "tokens": args.max_new_tokens}


def base_of(name: str) -> tuple[str | None, str | None]:
    """Return hub id and commit of a target, each None if unknown."""
    if is_builtin(name):
        origin = BUILTIN_TARGETS.get(name).origin.partition(",")[0]
        return (origin if is_hub_id(origin) else None), None
    if not is_hub_id(name):
        return None, None
    cached = try_to_load_from_cache(name, CONFIG)
    return name, Path(cached).parent.name if isinstance(cached, str) else None


def card_of(head: EagleHead, target: Target, ours: bool, found: dict[str, Any], args: argparse.Namespace) -> ModelCard:
    """Write the card: the Hub's metadata, training record, measurement and usage."""
    config, record = head.config, record_of(head.config.training)
    base, revision = base_of(target.name)
    base, revision = args.base_model or base, args.base_revision or revision
    method, layers = "eagle3" if config.layout == "eagle3" else "eagle", int(target.config.num_hidden_layers)
    data = ModelCardData(
        base_model=base,
        license=args.license or (BUILTIN_TARGETS.get(target.name).license.lower() if is_builtin(target.name) else None),
        library_name="fsd-toolkit",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", method],
        datasets=args.dataset,
    )
    name, metrics = base or target.name, record_of(record.get("metrics"))
    agreement = [metrics[key] for step in range(64) if (key := f"val_agreement_{step}") in metrics]
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        revision=revision,
        layout={"eagle": "EAGLE-1/2", "eagle3": "EAGLE-3", "fsd": "fsd"}[config.layout],
        config=config,
        record=record,
        options=record_of(record.get("hyperparameters")),
        agreement=", ".join(f"{value:.1%}" for value in agreement if isinstance(value, int | float)),
        repository=args.repository,
        ours=ours,
        method=method,
        obstacles={engine: obstacle(config, engine, layers) for engine in ("vllm", "sglang")},
        **found,
    )
