"""Errors that a user can fix. Every message names the fault and the remedy."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FsdError(ValueError):
    """Base class of all errors raised for bad input."""


class UnknownNameError(FsdError, KeyError):
    """An unknown name of a rule, divergence, drafter, loss or built-in target."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class ModelLoadError(FsdError):
    """A target or drafter that cannot be found, fetched, verified or used."""


class CheckpointError(FsdError):
    """A drafter checkpoint that is truncated, malformed or was trained for another target."""


class VocabularyMismatchError(FsdError):
    """Target and drafter do not share one vocabulary."""


class ContextLengthError(FsdError):
    """A request that does not fit the target's context."""


class CacheMemoryError(FsdError):
    """A request whose KV caches take more memory than is free or allowed."""


class NonFiniteLogitsError(FsdError):
    """The target or the drafter produced NaN, +inf or only -inf logits."""


class DataError(FsdError):
    """A malformed row in a data file. The message names file and line."""


class KernelsError(FsdError):
    """CPU kernels that FSD_KERNELS asks for and that do not exist or cannot run here."""


class NonFiniteLossError(FsdError):
    """Training produced a NaN or infinite loss or gradient."""


def causes(error: BaseException, implicit: bool = False) -> Iterator[BaseException]:
    """Yield ``error`` and what caused it, outermost first, each exception once: a chain may lead back into itself.

    Args:
        error: the outermost exception.
        implicit: also follow exceptions that were being handled when the next one was raised.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (current.__context__ if implicit else None)


def imported(module: str, what: str, extra: str, error: type[FsdError] = FsdError) -> Any:
    """Import a module of an optional package.

    Args:
        module: its name.
        what: what needs it, for the error.
        extra: the extra of this distribution that installs the package.
        error: to raise if the package is missing.
    """
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        package = module.partition(".")[0]
        raise error(f"{what} needs the package {package}: pip install 'fsd-toolkit[{extra}]'.") from cause


def shortened(error: BaseException, most: int = 600) -> str:
    """Return an exception's message on one line, without torch's C++ stack."""
    text = " ".join(str(error).partition("Exception raised from")[0].split())[:most]
    return text if isinstance(error, (OSError, ValueError, ImportError)) and text else f"{type(error).__name__}: {text}"


@contextmanager
def foreign_errors(kind: type[FsdError], message: str, most: int = 600) -> Iterator[None]:
    """Raise an error of ours in place of any that other code raises within the block. Ours pass.

    Args:
        kind: type of the error.
        message: its text, in which "{why}" stands for what the other error says.
        most: most characters of that.
    """
    try:
        yield
    except FsdError:
        raise
    except Exception as error:
        raise kind(message.replace("{why}", shortened(error, most))) from error
