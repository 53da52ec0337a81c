"""The command `fsd-train`; it imports a subcommand only to run it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from functools import partial

from fsd_infer.cli.run import BAD_INPUT, needed, run
from fsd_infer.errors import UnknownNameError
from fsd_train.commands.command_lines import COMMANDS, PARSERS

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
         "`fsd-train COMMAND --help` lists a command's options."]
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console command; :func:`fsd_infer.cli.run.run` defines its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage(), file=sys.stderr if not args else sys.stdout)
        return 0 if args else BAD_INPUT
    name = args[0]
    return run(f"fsd-train {name}" if name in HELP else "fsd-train", partial(_command, args))


def _command(args: Sequence[str]) -> int:
    if args[0] not in HELP:
        raise UnknownNameError(f"unknown command {args[0]!r}. Known: {', '.join(HELP)}.")
    if args[0] in PARSERS:
        PARSERS[args[0]]().parse_args(args[1:])  # --help and mistakes end here, before heavy imports
    elif list(args[1:]) in (["--help"], ["-h"]):
        for name in ("lightning", "jsonargparse"):
            needed(name)
        for asked in ("--help", "--model.help=EagleModule"):  # the second for a model section without class_path
            with contextlib.suppress(SystemExit):
                _run([args[0], asked])
        return 0
    return _run(args)


def _run(args: Sequence[str]) -> int:
    parsed = args[0] in PARSERS  # else Lightning parses the options of fit and validate
    module = importlib.import_module(f"fsd_train.commands.{args[0].replace('-', '_') if parsed else 'fit'}")
    return int(module.main(args[1:] if parsed else args) or 0)


if __name__ == "__main__":
    sys.exit(main())
