"""`fsd-train publish`: check a head with its target, show its model card, and upload both to the Hub."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    ModelCard,
    ModelCardData,
    constants,
    get_token,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from fsd_core.errors import CheckpointError, DataError
from fsd_core.files import jsonable
from fsd_core.hub import HubError, hub_errors, is_hub_id
from fsd_core.text.encoding import read_prompts
from fsd_core.text.row_check import RowCheck
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import EagleDrafter, TreeShape
from fsd_infer.environment import environment
from fsd_infer.heads.export import obstacle
from fsd_infer.heads.formats import head_kind, read_config
from fsd_infer.heads.head import EagleHead
from fsd_infer.heads.kinds import OLD, OURS
from fsd_infer.heads.stored_parts import CONFIG
from fsd_infer.heads.weights import INDEX, SINGLE
from fsd_infer.targets.loading import BUILTIN_TARGETS, is_builtin
from fsd_infer.targets.target import Target
from fsd_train.commands.export import record_of, target_of
from fsd_train.commands.head_checks import accepted_shares, runs_of
from fsd_train.repository import find

TEMPLATE = Path(__file__).with_name("card.md.in")
RESULTS = "results.json"  # what the card's tables say, for programs
CURVE = "curve.png"
MIN_TAU = 1.05  # acceptance length below which hardly any draft is accepted
DRAFTS = 7  # of the chains by which heads are compared


def main(args: argparse.Namespace) -> int:
    """Run `fsd-train publish`. The exit status is 1 if the user declines the upload."""
    directory = Path(args.directory)
    if args.yes:
        check_access(args.repository)
    elif sys.stdin.isatty():  # the card is shown even to those who cannot upload it
        try:
            check_access(args.repository)
        except HubError as error:
            print(f"warning: {error}", file=sys.stderr)
    if args.curve and not Path(args.curve).is_file():
        raise DataError(f"{args.curve} is missing. Give the picture that LossCurve wrote, or leave --curve out.")
    kind = head_kind(directory)
    if kind in (None, OLD):
        problem = "not a head" if kind is None else "a head in the format of an earlier version"
        raise DataError(f"{directory} is {problem}. Write it with `fsd-train export` first.")
    target = Target.from_pretrained(target_of(directory, args.target))
    head = EagleHead.from_pretrained(directory, target, dtype=target.dtype)
    measurement = measured(head, target, args)
    card = card_of(head, target, kind == OURS, measurement, args)
    base, revision = base_of(target.name)
    results = results_of(measurement, args.base_model or base or Path(target.name).name, args.base_revision or revision)
    print(card.content)
    files = [file for file in (CONFIG, SINGLE, INDEX) if (directory / file).is_file()]
    files += sorted(file.name for file in directory.glob("model-*.safetensors"))
    shown = ", ".join([RESULTS, *([CURVE] if args.curve else []), *files])
    print(f"\n{args.repository}: README.md (above), {shown} of {directory}", file=sys.stderr)
    if card.data.get("base_model") is None:
        print(f"warning: no reader finds the target {Path(target.name).name}: give its --base-model.", file=sys.stderr)
    if not args.yes:
        if not sys.stdin.isatty():
            raise DataError("no terminal to ask for confirmation. Check the card above, and give --yes to upload.")
        if input(f"Upload these to {args.repository}? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    print(upload(args.repository, directory, files, card, results, args), file=sys.stderr)
    return 0


def check_access(repository: str) -> None:
    """Raise HubError before the measurement where no upload can follow it.

    That is offline, without a token, or with one that the Hub does not know or that may only read. A Hub that does not
    say is no reason to stop, which is said on stderr.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"{repository}: nothing is uploaded while HF_HUB_OFFLINE is set. Unset it.")
    if get_token() is None:
        raise HubError(f"{repository}: an upload needs a token. Log in with `hf auth login`, or set HF_TOKEN.")
    try:
        with hub_errors(repository):
            access = HfApi().whoami()
    except HubError as error:
        cause = error.__cause__
        if isinstance(cause, OfflineModeIsEnabled):
            raise HubError(f"{repository}: {cause}. Check the connection and HF_ENDPOINT.") from error
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        if status in (401, 403):
            raise HubError(
                f"{repository}: the Hub refuses the token (status {status}). Log in again with `hf auth login`, or set "
                "another HF_TOKEN, which counts before it."
            ) from error
        print(f"warning: whether the token may write is not known: {error}", file=sys.stderr)
        return
    if record_of(record_of(record_of(access).get("auth")).get("accessToken")).get("role") == "read":
        raise HubError(f"{repository}: the token may only read. Log in with one that may write.")


def upload(
    repository: str,
    directory: Path,
    files: Sequence[str],
    card: ModelCard,
    results: dict[str, Any],
    args: argparse.Namespace,
) -> str:
    """Commit files, card and results to a repository, created if missing; return the commit's address."""
    config = json.dumps(without_paths(read_config(directory)), indent=2).encode()
    operations = [CommitOperationAdd(file, config if file == CONFIG else str(directory / file)) for file in files]
    operations.append(CommitOperationAdd("README.md", str(card).encode()))
    operations.append(CommitOperationAdd(RESULTS, json.dumps(jsonable(results), indent=2).encode()))
    if args.curve:
        operations.append(CommitOperationAdd(CURVE, args.curve))
    with hub_errors(repository, args.revision):
        api = HfApi()
        api.create_repo(repository, private=args.private or None, exist_ok=True)
        message = f"Draft head for {card.data.get('base_model') or 'speculative decoding'}"
        return str(api.create_commit(repository, operations, commit_message=message, revision=args.revision).commit_url)


def without_paths(value: Any) -> Any:
    """Reduce absolute paths in a JSON value to their last part, to publish nothing about the machine."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def measured(head: EagleHead, target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the acceptance length of exact, greedy decoding. Raises CheckpointError if it is near 1."""
    shape = TreeShape.parse(args.tree)
    source = find(args.prompts)
    if not source.exists():
        raise DataError(f"{args.prompts} is missing. Give prompts for the measurement as --prompts.")
    check = RowCheck(args.strict)
    rows = check.first(read_prompts(source, check), args.limit)
    check.finish()
    if not rows:
        raise DataError(f"{source} holds no prompts. Give others as --prompts.")
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    decoder = FuzzyDecoder(target, EagleDrafter(head, target, shape))
    conversations: list[Any] = [row.messages for row in rows]
    tau = decoder.generate(conversations, **options).stats.acceptance_length
    if not tau >= MIN_TAU:
        raise CheckpointError(
            f"{args.directory} has an acceptance length of {tau:.2f} with {target.name}, where 1 means no draft. "
            "Run `fsd-train doctor`."
        )
    chains = FuzzyDecoder(target, EagleDrafter(head, target, TreeShape(DRAFTS, 1, DRAFTS + 1)))
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row.source, []).append(row.messages)
    return {
        "tau": tau,
        "shape": shape,
        "prompts": f"{len(rows)} of {source.name}",
        "tokens": args.max_new_tokens,
        "groups": [group_of(name, chains, prompts, options) for name, prompts in groups.items()],
    }


def group_of(name: str, decoder: FuzzyDecoder, prompts: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return what chains of :data:`DRAFTS` drafts reach on a use case.

    Returns:
        name, prompts; ``accepted``: share of rounds whose drafts 1 to k were all accepted, by k; ``tau``: tokens per
        target forward with up to k drafts, 1 plus the sum of those shares, by k.
    """
    output = decoder.generate(list(prompts), **options)
    accepted = accepted_shares([run for record in output.records for run in runs_of(record.sources)], DRAFTS)
    taus = [1 + sum(accepted[: k + 1]) for k in range(DRAFTS)]
    return {"name": name, "prompts": len(prompts), "accepted": accepted, "tau": taus}


def results_of(measurement: dict[str, Any], name: str, revision: str | None) -> dict[str, Any]:
    """Return the card's measurement for programs, without the shape of classes or paths."""
    machine_facts = environment([])
    machine = {key: machine_facts[key] for key in ("fsd_infer", "torch", "transformers", "cpu", "gpu", "date")}
    return {
        "target": name,
        "revision": revision,
        "rule": "exact",
        "temperature": 0.0,
        "prompts": measurement["prompts"],
        "max_new_tokens": measurement["tokens"],
        "tree": {"shape": str(measurement["shape"]), "tau": measurement["tau"]},
        "chains": {"drafts": DRAFTS, "groups": measurement["groups"]},
        "environment": machine,
    }


def base_of(name: str) -> tuple[str | None, str | None]:
    """Return hub id and commit of a target, each None if unknown."""
    if is_builtin(name):
        origin = BUILTIN_TARGETS.get(name).origin.partition(",")[0]
        return (origin if is_hub_id(origin) else None), None
    if not is_hub_id(name):
        return None, None
    cached = try_to_load_from_cache(name, CONFIG)
    return name, Path(cached).parent.name if isinstance(cached, str) else None


def template_of(tokenizer: Any) -> str:
    """Return which chat template the measurement used, by the beginning of its hash."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return "none: prompts were continued as text"
    thinking = ", thinking as the template has it by default" if "enable_thinking" in template else ""
    return f"the target's own, sha256 {hashlib.sha256(template.encode()).hexdigest()[:8]}{thinking}"


def card_of(
    head: EagleHead, target: Target, ours: bool, measurement: dict[str, Any], args: argparse.Namespace
) -> ModelCard:
    """Write the card: the Hub's metadata, training record, measurement and usage."""
    config, record = head.config, without_paths(record_of(head.config.training))
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
    name, metrics = base or Path(target.name).name, record_of(record.get("metrics"))
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
        drafts=DRAFTS,
        curve=CURVE if args.curve else None,
        template=template_of(target.tokenizer),
        obstacles={engine: obstacle(config, engine, layers) for engine in ("vllm", "sglang")},
        **measurement,
    )
