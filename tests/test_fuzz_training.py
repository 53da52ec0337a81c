"""Malformed options of the training commands: each is understood, or refused in one line and status 2."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsd_infer.cli.run import BAD_INPUT
from fsd_train.command_lines import PARSERS
from tests.fuzzing import FUZZ, one_line, values


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    """(command, options), the options mostly the command's own, with values that they may or may not take."""
    command = draw(st.sampled_from(sorted(PARSERS)))
    options = [action for action in PARSERS[command]()._actions if action.dest != "help"]
    argv: list[str] = []
    for action in draw(st.lists(st.sampled_from(options), max_size=4)):
        names = [draw(st.sampled_from(action.option_strings))] if action.option_strings else []
        argv += [*names, *([] if action.nargs == 0 else draw(st.lists(values, min_size=1, max_size=2)))]
    return command, argv


@settings(FUZZ, max_examples=300)
@given(line=command_lines())
def test_options_of_the_training_commands(line: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    command, argv = line
    try:
        found = PARSERS[command]().parse_args(argv)
    except SystemExit as stop:
        said = capsys.readouterr().err
        assert stop.code == BAD_INPUT and said.startswith(f"fsd-train {command}: ") and said.count("\n") == 1, said
        one_line(said.strip())
    else:
        counts = [value for name, value in vars(found).items() if isinstance(value, int) and name != "seed"]
        assert all(0 <= value < 2**31 for value in counts)
