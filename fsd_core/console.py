"""Errors of the commands: each becomes one line and an exit status; and a parser with such errors."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any, NoReturn

from fsd_core.errors import FsdError
from fsd_core.registry import did_you_mean

UNEXPECTED = 1  # an internal error
BAD_INPUT = 2  # as argparse exits
INTERRUPTED = 130  # as shells report it: 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE
EXTRAS = {
    **dict.fromkeys(("scipy", "matplotlib"), "bench"),
    **dict.fromkeys(("fastapi", "uvicorn", "prometheus_client"), "serve"),
    "lm_eval": "lm-eval",
    "deepspeed": "deepspeed",
    **dict.fromkeys(("torchao", "bitsandbytes", "compressed_tensors", "optimum"), "quant"),
    **dict.fromkeys(("lightning", "peft", "datasets", "torchmetrics", "jsonargparse", "tensorboardX", "yaml"), "train"),
}  # the extra of pyproject.toml that installs a package
_LONGEST = 2000  # characters of a line


def run(program: str, command: Callable[[], int | None], debug: bool = False) -> int:
    """Run a command and return its exit status.

    ======================  ==========================================================================================
    0                       success (or the status that the command returned)
    2, a line               bad input: an FsdError, a file that cannot be read or written, a package not installed
    1, a line               an internal error; the line names a file that holds the traceback
    130                     interrupted
    143, 129                ended by SIGTERM or SIGHUP within :func:`terminable`
    141                     the reader of the output is gone
    ======================  ==========================================================================================

    Args:
        program: name that the line begins with.
        command: does the work.
        debug: raise errors instead, except interrupts.
    """
    _forgiving_streams()
    try:
        return int(command() or 0)
    except TerminatedError as error:
        return _say(program, str(error), 128 + error.number)
    except KeyboardInterrupt:
        _expect_another()
        return _say(program, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # or Python complains again when it flushes the rest
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # panics of Rust libraries are no Exceptions
        if debug:
            raise
        if (text := _of_input(error)) is not None:
            return _say(program, text, BAD_INPUT)
        message = f"unexpected {type(error).__name__}: {error} (a bug; its traceback is in {_keep_traceback(program)})"
        return _say(program, message, UNEXPECTED)


def _expect_another() -> None:
    """Let a second Ctrl-C print nothing, while the interpreter waits for threads at its end."""
    usual = sys.unraisablehook
    sys.unraisablehook = lambda it: None if issubclass(it.exc_type, KeyboardInterrupt) else usual(it)


class TerminatedError(KeyboardInterrupt):
    """A signal came that ends work as Ctrl-C does: ``number``, SIGTERM or SIGHUP."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__("terminated" if number == signal.SIGTERM else "hung up")
        self.number = number


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise TerminatedError on the first SIGTERM or SIGHUP within the block, so that work is kept and children end.

    Later ones are ignored: schedulers often send two. So are those that are handled or ignored already (nohup), and all
    in another thread.
    """

    def end(number: int, frame: Any) -> NoReturn:
        for taken in ours:
            signal.signal(taken, signal.SIG_IGN)
        raise TerminatedError(number)

    is_main = threading.current_thread() is threading.main_thread()
    usual = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    ours = usual if is_main else []
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _of_input(error: BaseException) -> str | None:
    """Return what to tell the user of an error that bad input or a bad environment causes; None for a bug."""
    if isinstance(error, FsdError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}" if error.filename else str(error.strerror or error)
    if isinstance(error, MemoryError):
        return "out of memory: ask for less at once, or use a smaller model."
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("fsd_"):
        return _missing(error)
    return None


PLUGINS = "fsd_toolkit.plugins"  # group of entry points: modules that register rules, drafters, losses ...


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules of the user's, also from the working directory, and those that installed packages offer.

    Raises:
        FsdError: a module that cannot be imported.
    """
    if modules and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in [*modules, *(point.value for point in entry_points(group=PLUGINS))]:
        try:
            importlib.import_module(name)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise FsdError(f"--import {name}: {reason:.300}. Give a module here or of an installed package.") from error


def needed(package: str) -> None:
    """Raise ModuleNotFoundError for a missing package before the long work that needs it at its end."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(name=package)


class ConsoleParser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, without its usage, and names what was meant.

    Attributes:
        elsewhere: names of commands that other packages offer.
    """

    elsewhere: Collection[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:
            self._check_options(words)
        elif not words:
            self.print_help(sys.stderr)
            sys.exit(BAD_INPUT)
        parsed = super().parse_known_args(args, namespace)
        if self._subparsers is None:
            self._check_words(parsed[1], words)
        for action in self._actions:
            # how some Pythons read --option=--
            if action.nargs is None and getattr(parsed[0], action.dest, None) == []:
                self.error(f"argument {'/'.join(action.option_strings)}: expected one argument")
        return parsed

    def _check_options(self, words: Sequence[str]) -> None:
        """Report an unknown option before others that are missing, which it may stand for."""
        known = self._option_string_actions
        for word in itertools.takewhile(lambda word: word != "--", words):
            option = word.partition("=")[0]
            if re.fullmatch("--[a-z][a-z_-]*", option) and not any(name.startswith(option) for name in known):
                self.error(f"unknown option {option}.{did_you_mean(option, known)}")

    def _check_words(self, left: Sequence[str], words: Sequence[str]) -> None:
        """Report a word that belongs to no option, with the first option that is not given and may be meant."""
        word = next((word for word in left if not word.startswith("-")), None)
        if word is None:
            return
        given = {word.partition("=")[0] for word in words}
        free = [option for option in _meant(word) if option in self._option_string_actions and option not in given]
        hint = f" Did you mean {free[0]} {shlex.quote(word)}?" if free else ""
        self.error(f"unexpected argument {word!r:.60}.{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            known = [*action.choices, *self.elsewhere]
            self.error(f"unknown command {value!r:.60}.{did_you_mean(value, known)} Known: {', '.join(known)}")
        hint, listed = did_you_mean(value, map(str, action.choices)), ", ".join(map(str, action.choices))
        raise argparse.ArgumentError(action, f"invalid choice {value!r:.60}.{hint} Known: {listed}")

    def error(self, message: str) -> NoReturn:
        sys.exit(_say(self.prog, f"{message} (see {self.prog} --help)", BAD_INPUT))


def _meant(word: str) -> Sequence[str]:
    """Return the options that a word without one may be meant for: a text, a file, or a model's directory or name."""
    models, files, texts = ("--head", "--target", "--drafter"), ("--config", "--data", "--prompts"), ("--prompt",)
    if " " in word:
        return texts
    ending = os.path.splitext(word)[1]
    if os.path.isfile(word) or ending in (".json", ".jsonl", ".yaml", ".yml", ".txt"):
        return files if ending in (".yaml", ".yml") else files[1:]
    return (*models, *files, *texts)


def one_line(text: str) -> str:
    """Return ``text`` on one line: join blanks, escape unprintable characters, cut the middle of a long text."""
    line = " ".join(text.split())
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)


def _missing(error: ModuleNotFoundError) -> str:
    if error.name is None:  # Lightning's errors name the command themselves
        return str(error)
    package = error.name.partition(".")[0]
    requirement = f"'fsd-toolkit[{EXTRAS[package]}]'" if package in EXTRAS else package
    return f"the package {package} is not installed: pip install {requirement}"


def _say(program: str, text: str, status: int) -> int:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"{program}: {one_line(text)}", file=sys.stderr)
    return status


def _forgiving_streams() -> None:
    """Escape characters that a stream cannot encode, so that no answer ends in an error."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _keep_traceback(program: str) -> str:
    """Write the traceback to a file, and return its name, or to standard error if the disk is full."""
    options: Any = {"suffix": ".txt", "delete": False, "encoding": "utf-8", "errors": "replace"}
    try:
        with tempfile.NamedTemporaryFile("w", prefix=program.replace(" ", "-") + "-", **options) as file:
            traceback.print_exc(file=file)
        return file.name
    except OSError:
        traceback.print_exc()
        return "the lines above"


def run_parsed(program: str, args: argparse.Namespace) -> int:
    """Run the function of parsed options as :func:`run` does, after the plugins that they name."""

    def command() -> int:
        if not args.debug:
            quiet_transformers()
        load_plugins(args.imports or ())
        with terminable():
            return int(args.function(args) or 0)

    return run(program, command, args.debug)


def quiet_transformers() -> None:
    """Keep transformers' notes and loading bars out of the output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
