"""`fsd-train`: fit and validate by LightningCLI, and the commands around training."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fsd_infer.cli.run import BAD_INPUT, run
from fsd_infer.errors import FsdError, UnknownNameError
from fsd_train.repository import find


@dataclass(frozen=True)
class Command:
    """A subcommand: the function that runs it (``module:function``, taking the arguments) and one line of help."""

    function: str
    help: str


COMMANDS = {
    "fit": Command("fsd_train.cli:lightning", "train a head: fsd-train fit --config recipes/smollm2-135m.yaml"),
    "validate": Command("fsd_train.cli:lightning", "measure a checkpoint on the validation split"),
    "regenerate": Command("fsd_train.regenerate:main", "let the target answer prompts, to train on its answers"),
    "cache-features": Command("fsd_train.cache_features:main", "store the target's features of the answers"),
    "new-recipe": Command("fsd_train.new_recipe:main", "write a recipe for a target from its config"),
    "quickstart": Command("fsd_train.quickstart:main", "fetch the built-in model, train for a minute, decode, compare"),
    "finetune": Command("fsd_train.cli:finetune", "fine-tune a target: --config recipes/smollm2-135m-maths.yaml"),
    "export": Command("fsd_train.export:export_main", "write a checkpoint's head as config.json and safetensors"),
}


def finetune(argv: Sequence[str]) -> int:
    """`fsd-train finetune`: `fit` of a FinetuneModule."""
    from fsd_train.finetune_module import FinetuneModule

    return lightning(["fit", *argv], FinetuneModule)


def lightning(argv: Sequence[str], model_class: Any = None) -> int:
    """Runs LightningCLI with ``argv`` (the subcommand first); every option of Trainer, module and data is in --help.

    Args:
        argv: arguments.
        model_class: of the model section; by default a drafter's module, by the section's ``class_path``.
    """
    from lightning.pytorch import Trainer
    from lightning.pytorch.cli import LightningCLI

    from fsd_train.data import AnswersDataModule
    from fsd_train.distillation_module import DistillationModule
    from fsd_train.eagle_module import EagleModule
    from fsd_train.safety import check_checkpoint
    from fsd_train.strategies import check_ranks, named_strategy

    argv = with_recipes(argv)

    class TrainCLI(LightningCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            super().parse_arguments(parser, args)
            if self.config.get("subcommand") == "fit":
                check_checkpoint(self.config["fit"].get("ckpt_path"))  # before anything is loaded

        def _parse_ckpt_path(self) -> None:
            """Nothing: Lightning lets a checkpoint's model section win over recipe and command line, without a word."""

        def instantiate_classes(self) -> None:
            try:
                super().instantiate_classes()
            except ValueError as error:
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, FsdError):
                    cause = cause.__cause__  # the parser wraps what a class raises
                lacking = re.search(r"\S.*pip install.*", str(error))  # what Lightning says of a logger's package, say
                if cause is None and lacking is not None:
                    raise FsdError(f"the configuration needs a package that is not installed. {lacking[0]}") from None
                raise cause or error from None

        def instantiate_trainer(self, **kwargs: Any) -> Trainer:
            name = self._get(self.config_init, "trainer", default={}).get("strategy")
            if isinstance(name, str):
                kwargs.setdefault("strategy", named_strategy(name))
            return super().instantiate_trainer(**kwargs)

        def before_fit(self) -> None:
            check_ranks(self.model, self.trainer)

    if model_class is None:
        # a model section without class_path is a head's; `class_path: fsd_train.lm_module.LMModule` trains a small LM
        model_class = DistillationModule if class_paths(argv) - {"fsd_train.eagle_module.EagleModule"} else EagleModule
    TrainCLI(
        model_class,
        AnswersDataModule,
        subclass_mode_model=True,
        seed_everything_default=0,
        # the data module's batch sampler splits the batches among replicas itself
        trainer_defaults={"use_distributed_sampler": False},
        # a run that is continued must not be stopped by the record of its own settings
        save_config_kwargs={"overwrite": True},
        args=list(argv),
    )
    return 0


def with_recipes(argv: Sequence[str]) -> list[str]:
    """``argv`` with the names of recipes after --config replaced by their paths, as far as they are not files here."""
    words, after = [], False
    for word in argv:
        option, equals, value = word.partition("=")
        if after:
            word = str(find(word))
        elif option == "--config" and equals:
            word = f"{option}={find(value)}"
        after = word in ("-c", "--config")
        words.append(word)
    return words


def class_paths(argv: Sequence[str]) -> set[str]:
    """The model classes that options and configuration files name. Files that cannot be read are left to the parser."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=[])
    parser.add_argument("-c", "--config", action="append")
    parser.add_argument("--model", "--model.class_path", "--model.help", dest="names", action="append", nargs="?")
    found = parser.parse_known_args(argv)[0]
    names = set(found.names) - {None}
    for path in found.config:
        try:
            config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            names.add(config["model"]["class_path"])
        except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
            continue
    return names


def usage() -> str:
    """The text of `fsd-train --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: fsd-train COMMAND [options]", "", "Trains draft heads for fsd-infer.", "", "commands:", *lines, "",
         "`fsd-train COMMAND --help` tells a command's options."]
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The console command; how it ends: :func:`fsd_infer.cli.run.run`."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage(), file=sys.stderr if not args else sys.stdout)
        return 0 if args else BAD_INPUT
    name = args[0]
    return run(f"fsd-train {name}" if name in COMMANDS else "fsd-train", partial(_command, args))


def _command(args: Sequence[str]) -> int:
    command = COMMANDS.get(args[0])
    if command is None:
        raise UnknownNameError(f"unknown command {args[0]!r}. Known: {', '.join(COMMANDS)}.")
    module_name, function_name = command.function.split(":")
    function = getattr(importlib.import_module(module_name), function_name)
    return int(function(args if function_name == "lightning" else args[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
