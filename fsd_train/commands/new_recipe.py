"""`fsd-train new-recipe`: a commented recipe from a target's config."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from jinja2 import StrictUndefined, Template

from fsd_bench.roofline import size
from fsd_core.files import writable, write_text
from fsd_infer.targets.kinds import EAGER_FAMILIES
from fsd_train.commands.sizing import (
    SMALL,
    Choices,
    TrainingFacts,
    choose,
    count_text,
    facts_of,
    feature_bytes,
    fit_to_data,
    hardware,
    memory,
)
from fsd_train.repository import SHIPPED

TEMPLATE = Path(__file__).with_name("recipe.yaml.in")


def slug(name: str) -> str:
    """Make a file name of the last part of a target's name."""
    return re.sub(r"[^a-z0-9.]+", "-", Path(name).name.lower()).strip("-.") or "target"


def _yaml(*names: str) -> str:
    """Format names as items of a YAML list on one line."""
    return yaml.safe_dump(list(names), default_flow_style=True, allow_unicode=True, width=math.inf).strip()[1:-1]


def own_directory(name: str) -> str:
    """Return the directory of a target's run, with a suffix if a shipped recipe writes there."""
    run = f"runs/{slug(name)}"
    files = [path for root in (SHIPPED.parent.parent, SHIPPED) for path in root.glob("recipes/*.yaml")]
    line = re.compile(rf"^(output_dir| +default_root_dir): {re.escape(run)}( |$)", re.M)
    taken = any(line.search(path.read_text(encoding="utf-8")) for path in files)
    return f"{run}-new" if taken else run


def render(facts: TrainingFacts, choices: Choices, files: Sequence[str] = (), run: str = "") -> str:
    """Format the recipe as YAML; ``run``: directory of the run (default: named after the target)."""
    run, small = run or f"runs/{slug(facts.name)}", facts.hidden_size <= SMALL
    if choices.coverage is not None:
        why = f"holds {choices.coverage:.1%} of the tokens of the answers"
    elif choices.draft_vocab_size is None:
        why = f"all {facts.vocab_size} ids"
    else:
        why = f"of {facts.vocab_size}; EAGLE-3 and SpecForge use 32000"
    template = Template(
        TEMPLATE.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    return template.render(
        facts=facts, choices=choices, files=files, run=run, small=small, why=why, every=200 if small else 500,
        hardware=hardware(facts, choices), parts=memory(facts, choices), eager_families=EAGER_FAMILIES,
        feature_bytes=feature_bytes(facts.head(choices.draft_vocab_size)), target=_yaml(facts.name),
        answers=_yaml(*(files or [f"{run}/answers.jsonl"])), count_text=count_text, size=size,
    )  # fmt: skip


def recipe_for(name: str, files: Sequence[str] = ()) -> str:
    """Make a recipe for a target and optional answers. Raises as :func:`facts_of` and :func:`fit_to_data`."""
    facts = facts_of(name)
    choices = choose(facts)
    return render(facts, fit_to_data(facts, choices, files) if files else choices, files, run=own_directory(name))


def main(args: argparse.Namespace) -> int:
    """Run `fsd-train new-recipe`."""
    if args.output is not None:
        writable(args.output, "the recipe", args.overwrite)
    text = recipe_for(args.target, args.data)
    path = args.output or "RECIPE"
    if args.output is None:
        sys.stdout.write(text)
    else:
        write_text(Path(path), text.replace("--config RECIPE", f"--config {path}"))
    config = yaml.safe_load(text)
    regenerate = [] if args.data else [f"fsd-train regenerate --config {path} --prompts PROMPTS.jsonl"]
    lines = [
        f"{'wrote ' + path if args.output else 'the recipe'}: a head for {args.target}, "
        f"{config['trainer']['max_steps']} steps, everything goes to {config['output_dir']}. Next:",
        *(f"  {line}" for line in [*regenerate, f"fsd-train fit --config {path}"]),
    ]
    print("\n".join(lines), file=sys.stderr)
    return 0
