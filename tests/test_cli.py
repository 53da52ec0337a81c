"""Both command lines: answers on a tiny model, and one line and an exit status whatever goes wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsd_infer import FsdError, FuzzyDecoder
from fsd_infer.cli.main import build_parser, main
from fsd_infer.cli.options import gibibytes, positive, real_number, thread_count, whole_number
from fsd_infer.cli.run import BAD_INPUT, BROKEN_PIPE, INTERRUPTED, UNEXPECTED, run
from fsd_infer.divergence import DIVERGENCES
from fsd_infer.files import writable, write_text
from fsd_infer.registry import read_float, read_int
from fsd_infer.rules import RULES, Source
from fsd_train.commands.command_lines import PARSERS
from tests.bench_toys import Toy
from tests.fuzzing import called
from tests.text_toys import write_rows

PROMPT = "the cat sat on the mat"


def call(*argv: str) -> tuple[int, str, str]:
    """Return (exit status, stdout, stderr)."""
    return called(main, list(argv))


def generate(toy: Toy, *argv: str, prompt: str = PROMPT) -> tuple[int, str, str]:
    return call("generate", "--prompt", prompt, *toy.models, *argv)


def test_the_answer_and_a_line_of_statistics(toy: Toy, toy_decoder: FuzzyDecoder) -> None:
    expected = toy_decoder.generate(PROMPT, "exact", max_new_tokens=12, temperature=0)
    status, out, err = generate(toy, "--max-new-tokens", "12")
    assert status == 0 and out == expected.texts[0] + "\n"
    assert f"{len(expected.sequences[0])} tokens" in err and "rule exact" in err and "tau" in err
    streamed = generate(toy, "--max-new-tokens", "12", "--stream")[1]
    assert streamed.strip() == expected.texts[0].strip()


def test_json_holds_tokens_sources_and_statistics(toy: Toy, toy_decoder: FuzzyDecoder) -> None:
    rule = "fuzzy:tv:0.4:budget=3"
    status, out, _ = generate(toy, "--rule", rule, "--max-new-tokens", "16", "--json", "--seed", "0")
    record = json.loads(out)
    expected = toy_decoder.generate(PROMPT, rule, max_new_tokens=16, temperature=0, seed=0)  # a seed reads no clock
    assert status == 0
    assert record["tokens"] == expected.sequences[0] and record["text"] == expected.texts[0]
    assert record["sources"] == [Source(s).name.lower() for s in expected.records[0].sources]
    assert record["stats"]["rule"]["threshold"] == 0.4 and record["stats"]["rule"]["budget"] == 3
    assert record["stats"]["target_forwards"] == expected.stats.target_forwards


def test_rules_lists_every_name() -> None:
    status, out, _ = call("rules")
    assert status == 0
    for name in [*RULES, *DIVERGENCES, "eagle", "lm", "smollm2-135m"]:
        assert name in out


BAD = {
    "unknown rule": (["--rule", "fuzy"], "unknown rule 'fuzy'. Did you mean 'fuzzy'?"),
    "negative threshold": (["--rule", "fuzzy:js:-0.1"], "threshold"),
    "dtype": (["--dtype", "bf8"], "unknown dtype 'bf8'"),
    "tree": (["--tree", "5,6"], "a tree is written depth,width,nodes"),
    "endless tree": (["--tree", "999999,2,4"], "depth from 1 to"),
    "wide tree": (["--tree", "256,256,4"], "candidates"),
    "infinite temperature": (["--temperature", "inf"], "must be 0 or above and finite"),
    "endless k": (["--rule", "fuzzy:top_k_js:" + "9" * 21 + ":0.3"], "k must be a whole number"),
    "one drafter twice": (["--drafter", "lookup+lookup"], "names lookup twice"),
    "no such device": (["--device", "abacus"], "cannot be used here"),
    "absent device": (["--device", "xpu"], "cannot be used here"),
    "NUL": (["--target", "a\0b"], "holds a NUL"),
    "long name": (["--drafter", "x" * 5000], "too long"),
    "temperature": (["--temperature", "-1"], "--temperature must be 0 or above"),
    "top-p": (["--temperature", "1", "--top-p", "1.5"], "--top-p"),
    "top-p and greedy": (["--top-p", "0.5"], "no effect at temperature 0"),
    "beams and a rule": (["--num-beams", "2", "--rule", "tilted:2"], "has no meaning with num_beams > 1"),
    "streamed beams": (["--num-beams", "2", "--stream"], "--stream shows one answer as it grows"),
    "no beams": (["--beam-options", "depth=4"], "needs beams: add --num-beams"),
    "unknown beam option": (["--num-beams", "2", "--beam-options", "width=4"], "beam option 'width=4'"),
    "greedy and narrow": (["--num-beams", "2", "--beam-options", "join_every=4"], "a temperature above 0"),
    "unknown target": (["--target", "smolm2-135m"], "unknown target 'smolm2-135m'. Did you mean 'smollm2-135m'?"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_in_one_line(name: str, toy: Toy) -> None:
    extra, message = BAD[name]
    status, out, err = generate(toy, *extra)
    assert status == 2 and out == ""
    assert err.startswith("fsd-infer: ") and err.count("\n") == 1 and message in err


def test_other_bad_input(toy: Toy, tmp_path: Path) -> None:
    for prompt, message in (("  ", "the prompt is empty"), ("the cat " * 200, "context of 256 tokens")):
        status, _, err = generate(toy, prompt=prompt)
        assert status == 2 and message in err
    status, _, err = call("generate", "--prompt-file", str(tmp_path / "none.txt"), *toy.models)
    assert status == 2 and "none.txt: cannot be read" in err
    assert call("generate", "--prompt", PROMPT, "--stream", "--json")[0] == 2
    with pytest.raises(ValueError, match="unknown rule"):
        main(["generate", "--prompt", PROMPT, "--rule", "fuzy", "--debug"])


@pytest.mark.parametrize(
    ("row", "extra", "message"),
    [
        ({"promt": "the mat"}, [], "rows.jsonl:1: no prompt"),
        ({"prompt": "the cat " * 200}, [], "rows.jsonl:1: the prompt has"),
        ({"prompt": "the cat"}, ["--resume"], "--resume continues"),
        ({"prompt": "the cat"}, ["--methods", "plain,exat"], "unknown method 'exat'"),
        ({"prompt": "the cat"}, ["--methods", "hf-lookup", "--batch-size", "2"], "one prompt at a time"),
    ],
)
def test_bad_benchmarks_end_in_one_line(
    row: dict[str, str], extra: list[str], message: str, toy: Toy, tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [row, row])
    status, _, err = call("bench", "--prompts", str(file), "--methods", "plain", *toy.models, *extra)
    last = err.replace("\r", "\n").strip().splitlines()[-1]
    assert status == 2 and last.startswith("fsd-infer: ") and message in last


def test_every_option_has_help_and_every_option_on_a_page_exists(repo_root: Path) -> None:
    """On every page, each `fsd-infer COMMAND --option` is checked."""
    [commands] = [action.choices for action in build_parser()._actions if isinstance(action.choices, dict)]
    for name, parser in commands.items():
        assert not [action.option_strings for action in parser._actions if not action.help], name
    pages = [repo_root / "README.md", *(repo_root / "docs").glob("*.md"), *repo_root.glob("[!.]*/README.md")]
    lines = [line for page in pages for line in page.read_text("utf-8").replace("\\\n", " ").splitlines()]
    called = [found for line in lines for found in re.findall(r"fsd-infer ([a-z-]+)((?: [^`#|]*)?)", line)]
    asked = [(name, option) for name, rest in called for option in re.findall(r"(?<=\s)--[a-z][a-z-]+", rest)]
    unknown = [
        pair for pair in asked if pair[0] in commands and pair[1] not in commands[pair[0]]._option_string_actions
    ]
    assert len(asked) > 30 and not unknown
    assert not [name for name, rest in called if rest and "--" in rest and name not in commands]


def raiser(error: BaseException) -> object:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (FsdError("a bad\n  thing: fix it"), BAD_INPUT, "prog: a bad thing: fix it"),
        (IsADirectoryError(21, "Is a directory", "there"), BAD_INPUT, "prog: there: Is a directory"),
        (OSError("no space"), BAD_INPUT, "prog: no space"),
        (MemoryError(), BAD_INPUT, "prog: out of memory: ask for less"),
        (ModuleNotFoundError(name="peft.tuners"), BAD_INPUT, "prog: the package peft is not installed: pip install"),
        (ModuleNotFoundError("use `pip install x`"), BAD_INPUT, "prog: use `pip install x`"),
        (KeyboardInterrupt(), INTERRUPTED, "prog: interrupted"),
        (BrokenPipeError(32, "Broken pipe"), BROKEN_PIPE, ""),
    ],
)
def test_errors_end_in_one_line(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("prog", raiser(error)) == status  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == bool(line)


def test_an_error_of_the_program_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("fsd-train fit", raiser(TypeError("no\nway"))) == UNEXPECTED  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert err.startswith("fsd-train fit: unexpected TypeError: no way (a bug;") and err.count("\n") == 1
    file = Path(re.findall(r"is in (.*)\)", err)[0])
    assert file.parent == tmp_path and "raise error" in file.read_text()
    with pytest.raises(TypeError):
        run("prog", raiser(TypeError("no")), debug=True)  # type: ignore[arg-type]


def test_a_pipe_that_closes_early_is_no_error() -> None:
    script = "from fsd_infer.cli.run import run; run('p', lambda: print('x\\n' * 10**6))"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(10)
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait() == 0


@pytest.mark.parametrize(
    ("text", "number", "value"),
    [
        ("-7", -7, -7.0), ("007", 7, 7.0), (".5", None, 0.5), ("1e-3", None, 1e-3), ("inf", None, float("inf")),
        *((text, None, None) for text in ("", "0_1", " 1", "1\n", "\u0661", "1e400", "1e-400", "nan", "0x1", "1,5")),
        ("9" * 5000, None, None),
    ],
)  # fmt: skip
def test_numerals(text: str, number: int | None, value: float | None) -> None:
    assert read_int(text) == number and read_float(text) == value


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (positive, ["0", "-1", "1.5", "2147483648", "9" * 5000]),
        (thread_count, ["0", "100000"]),
        (real_number, ["much", "1e400", "0_1"]),
        (gibibytes, ["0", "-1", "inf", "1e308"]),
        (whole_number(0, 5), ["-1", "6"]),
    ],
)
def test_options_within_what_makes_sense(kind: object, bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    parser.add_argument("--try", type=kind)  # type: ignore[arg-type]
    for text in bad:
        with pytest.raises(SystemExit) as stop:
            parser.parse_args([f"--try={text}", "rules"])
        assert stop.value.code == BAD_INPUT
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and err.startswith("fsd-infer: argument --try: "), "one line, without the usage"


MISSING = [
    ("scipy", "fsd_infer", "bench --prompts none.jsonl", "bench"),
    ("scipy", "fsd_infer", "sweep --prompts none.jsonl --rules exact --output x", "bench"),
    ("scipy", "fsd_infer", "calibrate --prompts x --rules exact --at-most-nats 1 --output x", "bench"),
    ("lightning", "fsd_train", "fit --help", "train"),
    ("jsonargparse", "fsd_train", "fit --help", "train"),
]
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
from fsd_infer.cli.main import main as fsd_infer
from fsd_train.cli import main as fsd_train

class Without(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

sys.meta_path.insert(0, Without())
for package, program, command, _ in CASES:
    print(globals()[program](command.split()))
"""


def test_a_package_that_is_not_installed_is_named() -> None:
    """In a process of its own, which imports none of them before."""
    script = WITHOUT.replace("CASES", repr(MISSING))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(BAD_INPUT)] * len(MISSING), done.stderr
    for line, (package, _, _, extra) in zip(done.stderr.splitlines(), MISSING, strict=True):
        assert f"package {package} is not installed: pip install 'fsd-toolkit[{extra}]'" in line


INFER = ("generate", "bench", "sweep", "calibrate", "warmup")
HELP = {
    "fsd_infer.cli.main": [["--help"], *([name, "--help"] for name in INFER), ["generate", "--no-such-option"]],
    "fsd_train.cli": [["--help"], *([name, "--help"] for name in PARSERS), ["export", "--no-such-option"]],
}
HEAVY = """
import sys
from contextlib import suppress
from MODULE import main
for argv in CASES:
    with suppress(SystemExit):
        main(argv)
    heavy = {"torch", "transformers", "numpy", "lightning"} & set(sys.modules)
    assert not heavy, (argv, heavy)
"""


@pytest.mark.parametrize("module", HELP)
def test_help_imports_nothing_heavy(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes several seconds, where a command should answer in a fraction."""
    monkeypatch.setenv("FSD_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    script = HEAVY.replace("MODULE", module).replace("CASES", repr(HELP[module]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["pipe", "directory", "", "file/x", "a\0b", "x" * 300])
def test_what_cannot_be_written_is_found_before_the_work(name: str, tmp_path: Path) -> None:
    """And nothing but a file is ever replaced, which a rename onto a device would do."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(FsdError, match="cannot be written|no name"):
        writable(f"{tmp_path}/{name}", "the record")
    if name in ("pipe", "directory"):
        with pytest.raises(FsdError, match="is no file and is not replaced"):
            write_text(tmp_path / name, "")
    assert writable(tmp_path / "new" / "record.json", "the record").parent.is_dir()
