"""The command `fsd-train`; it imports a subcommand only to run it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fsd_core.console import BAD_INPUT, load_plugins, needed, run, terminable
from fsd_core.errors import UnknownNameError
from fsd_core.registry import unknown_name
from fsd_train.commands.command_lines import COMMANDS, PARSERS
from fsd_train.commands.recipe_keys import check

HELP = {
    "fit": "Train a head: fsd-train fit --config recipes/smollm2-135m.yaml.",
    "validate": "Measure a checkpoint on the validation split.",
    **{name: description for name, (description, _) in COMMANDS.items()},
}


def usage() -> str:
    """Return the text of `fsd-train --help`."""
    width = max(map(len, HELP))
    lines = [f"  {name:<{width}}  {text}" for name, text in HELP.items()]
    return "\n".join(
        ["usage: fsd-train COMMAND [options]", "", "Trains draft heads for fsd-infer.", "", "commands:", *lines, "",
         "`fsd-train COMMAND --help` lists a command's options; `fsd-train --version` prints the version."]
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console command; :func:`fsd_core.console.run` defines its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage(), file=sys.stderr if not args else sys.stdout)
        return 0 if args else BAD_INPUT
    if args[0] == "--version":
        from fsd_infer import __version__

        print(f"fsd-train {__version__}")
        return 0
    name = args[0]
    return run(f"fsd-train {name}" if name in HELP else "fsd-train", partial(_command, name, args[1:]))


def _command(name: str, words: list[str]) -> int:
    if name not in HELP:
        raise UnknownNameError(unknown_name("command", name, HELP))
    if name in PARSERS:
        args = PARSERS[name]().parse_args(words)  # --help and mistakes end here, before heavy imports
        load_plugins(getattr(args, "imports", None) or ())
        if target := getattr(args, "target", None):
            from fsd_infer.drafters.loading import refuse_head

            refuse_head(Path(target))
        with terminable():  # fit and validate end by themselves, after a step
            return int(importlib.import_module(f"fsd_train.commands.{name.replace('-', '_')}").main(args))
    for package in ("lightning", "jsonargparse"):
        needed(package)
    check(words)
    from fsd_train.commands import fit  # Lightning parses the options of fit and validate

    if words not in (["--help"], ["-h"]):
        return fit.main([name, *words])
    for asked in ("--help", "--model.help=EagleModule"):  # the second for a model section without class_path
        with contextlib.suppress(SystemExit):
            fit.main([name, asked])
    return 0


if __name__ == "__main__":
    sys.exit(main())
