"""Both command lines: answers on a tiny model, and one line and an exit status whatever goes wrong."""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsd_bench.cli import build_parser as build_bench_parser
from fsd_core.console import BAD_INPUT, BROKEN_PIPE, INTERRUPTED, UNEXPECTED, TerminatedError, run
from fsd_core.options import gibibytes, positive, real_number, thread_count, whole_number
from fsd_infer import FsdError, FuzzyDecoder
from fsd_infer.cli.commands import _live_tokens, _show
from fsd_infer.cli.main import build_parser, main
from fsd_infer.cli.report import use_colour
from fsd_infer.rules import TokenOrigin
from fsd_infer.serving.listen import check_free
from fsd_train.commands.command_lines import PARSERS
from tests.bench_toys import Toy
from tests.fuzzing import called
from tests.text_toys import tiny_tokenizer, write_rows

PROMPT = "the cat sat on the mat"


def call(*argv: str) -> tuple[int, str, str]:
    """Return (exit status, stdout, stderr)."""
    return called(main, list(argv))


def generate(toy: Toy, *argv: str, prompt: str = PROMPT) -> tuple[int, str, str]:
    return call("generate", "--prompt", prompt, *toy.models, *argv)


def test_generate_prints_the_answer_and_its_statistics(toy: Toy, toy_decoder: FuzzyDecoder, tmp_path: Path) -> None:
    rule = "fuzzy:tv:0.4:budget=3"
    asked = ["--rule", rule, "--max-new-tokens", "16", "--seed", "0"]
    expected = toy_decoder.generate(PROMPT, rule=rule, max_new_tokens=16, temperature=0, seed=0)  # which reads no clock
    page = tmp_path / "new" / "answer.html"
    status, out, err = generate(toy, *asked, "--html", str(page))
    assert status == 0 and out == expected.texts[0] + "\n"
    assert f"{len(expected.sequences[0])} tokens" in err and "rule fuzzy" in err and "tokens per forward" in err
    assert generate(toy, *asked, "--stream")[1].strip() == expected.texts[0].strip()
    record = json.loads(generate(toy, *asked, "--json")[1])
    (shown,) = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[0])["answers"]
    assert shown["title"] == rule and sum(len(round["tokens"]) for round in shown["rounds"]) == len(record["tokens"])
    assert record["tokens"] == expected.sequences[0] and record["text"] == expected.texts[0]
    assert record["sources"] == [TokenOrigin(s).name.lower() for s in expected.records[0].sources]
    assert record["stats"]["rule"]["threshold"] == 0.4 and record["stats"]["rule"]["budget"] == 3
    assert record["stats"]["target_forwards"] == expected.stats.target_forwards


BAD = {
    "unknown rule": (["--rule", "fuzy"], "unknown rule 'fuzy'. Did you mean 'fuzzy'?"),
    "endless tree": (["--tree", "999999,2,4"], "depth from 1 to"),
    "wide tree": (["--tree", "256,256,4"], "candidates"),
    "infinite temperature": (["--temperature", "inf"], "must be 0 or above and finite"),
    "one drafter twice": (["--drafter", "lookup+lookup"], "names lookup twice"),
    "NUL": (["--target", "a\0b"], "holds a NUL"),
    "long name": (["--drafter", "x" * 5000], "too long"),
    "top-p": (["--temperature", "1", "--top-p", "1.5"], "--top-p"),
    "top-p and greedy": (["--top-p", "0.5"], "no effect at temperature 0"),
    "streamed beams": (["--num-beams", "2", "--stream"], "--stream shows one answer as it grows"),
    "no beams": (["--beam-options", "depth=4"], "needs beams: add --num-beams"),
    "greedy and narrow": (["--num-beams", "2", "--beam-options", "join_every=4"], "a temperature above 0"),
    "unknown option": (["--options", '{"no_such": 1}'], "unknown option 'no_such'"),
    "empty prompt": ([], "the prompt is empty"),
    "long prompt": ([], "context of 256 tokens"),
    "sampling as an option": (["--options", '{"do_sample": true}'], "use --temperature"),
    "a function as an option": (["--options", '{"prefix_allowed_tokens_fn": 5}'], "takes functions"),
    "rule as an option": (["--options", '{"rule": "tilted"}'], "--options: rule has an option of its own: use --rule."),
    "two prompts": (["--prompt", "another"], "--prompt: given twice, but a run answers one prompt"),
    "no page": (["--overwrite"], "--overwrite replaces the page of --html"),
    "colours of nothing": (["--color", "always"], "add --show-accepted"),
    "stream and json": (["--stream", "--json"], "--json"),
}


BAD_PROMPTS = {"empty prompt": "", "long prompt": "the cat " * 200}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_in_one_line(name: str, toy: Toy) -> None:
    extra, message = BAD[name]
    status, out, err = generate(toy, *extra, prompt=BAD_PROMPTS.get(name, PROMPT))
    assert status == 2 and out == ""
    assert err.startswith("fsd-infer") and err.count("\n") == 1 and message in err
    if name == "unknown rule":
        with pytest.raises(ValueError, match=re.escape(message)):
            main(["generate", "--prompt", PROMPT, *extra, "--debug"])


DAMAGED = {  # a target's file: what is written to it, what is said
    "config.json": ("{", "config.json: not JSON"), "model.safetensors": ("", "safetensors is truncated or damaged"),
    "generation_config.json": ("[1]", "generation_config.json is not a JSON object"),
    "tokenizer.json": ("{", "Check its files: tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_target_is_not_taken_for_a_drafter(name: str, toy: Toy, tmp_path: Path) -> None:
    shutil.copytree(toy.models[toy.models.index("--target") + 1], tmp_path / "target")
    content, message = DAMAGED[name]
    (tmp_path / "target" / name).write_text(content)
    status, _, err = generate(toy, "--target", str(tmp_path / "target"))
    assert status == 2 and str(tmp_path / "target") in err and message in err and "drafter" not in err


def test_what_cannot_serve_says_what_would(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no head")
    name = str(tmp_path / "file")
    status, _, err = generate(toy, "--drafter", name)
    assert status == 2 and "neither a head nor a model: give the directory" in err and f'"memory:{name}"' in err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(FsdError, match=f"cannot listen on 127.0.0.1:{port} .* another --port"):
            check_free("127.0.0.1", port)
        check_free("127.0.0.1", 0)
        script = "import sys; from fsd_infer.cli.main import main; status = main(sys.argv[1:])"
        script += "; print(status, 'torch' in sys.modules)"
        serving = [sys.executable, "-c", script, "serve", "--target", "nowhere", "--port", str(port)]
        done = subprocess.run(serving, capture_output=True, text=True)
        assert done.stdout == "2 False\n" and f"cannot listen on 127.0.0.1:{port}" in done.stderr, "before torch loads"
    for host in ("nowhere.invalid", "x" * 300):
        with pytest.raises(FsdError, match="has no address"):
            check_free(host, 0)
    with pytest.raises(FsdError, match="address of this machine as --host"):
        check_free("192.0.2.1", 0)


MEASURED = {
    "bench --prompts typo.jsonl --methods plain": "typo.jsonl:1: no prompt",
    "bench --prompts long.jsonl --methods plain": "long.jsonl:1: the prompt has",
    "bench --prompts p.jsonl --methods plain --resume": "--resume continues",
    "bench --prompts p.jsonl --methods plain,exat": "unknown method 'exat'",
    "bench --prompts p.jsonl --methods hf-lookup --batch-size 2": "one prompt at a time",
    "sweep --prompts p.jsonl --output x.jsonl --rules js --temperatures=-1": "temperature must be 0 or above",
    "sweep --prompts p.jsonl --output x.jsonl --rules fuzzy --temperatures 1,1": "temperature, and none twice",
    "sweep --prompts p.jsonl --output x.jsonl --rules fuzzy --tree auto": "a sweep compares rules on named trees",
    "worth --prompts p.jsonl --drafter lookup": "worth forecasts for heads and small LMs, not for drafter 'lookup'",
    "sweep --prompts p.jsonl --output x.jsonl --rules fuzzy --temperatures warm": "--temperatures",
    "worth --prompts p.jsonl --rules nonsense": "unknown rule 'nonsense'",
    "worth --prompts p.jsonl --tree auto": "give a shape for tree auto",
}


@pytest.mark.parametrize("words", MEASURED)
def test_bad_measurements(words: str, toy: Toy, here: Path) -> None:
    rows = {"typo": {"promt": "the mat"}, "long": {"prompt": "the cat " * 200}, "p": {"prompt": "it"}}
    for file, row in rows.items():
        write_rows(here / f"{file}.jsonl", [row, row])
    name, *asked = words.split()
    status, _, err = call(name, *toy.models, *asked)
    last = err.replace("\r", "\n").strip().splitlines()[-1]
    assert status == 2 and last.startswith("fsd-bench: ") and MEASURED[words] in last
    assert not Path("x.jsonl").exists()


def test_every_option_has_help_and_every_option_on_a_page_exists(repo_root: Path) -> None:
    """On every page, each `fsd-infer COMMAND --option` and `fsd-bench COMMAND --option` is checked."""
    parsers = (build_parser(), build_bench_parser())
    actions = [action for parser in parsers for action in parser._actions if isinstance(action.choices, dict)]
    commands = {name: parser for action in actions for name, parser in dict(action.choices or {}).items()}
    for name, parser in commands.items():
        assert not [action.option_strings for action in parser._actions if not action.help], name
    pages = [repo_root / "README.md", *(repo_root / "docs").glob("*.md"), *repo_root.glob("[!.]*/README.md")]
    lines = [line for page in pages for line in page.read_text("utf-8").replace("\\\n", " ").splitlines()]
    called = [found for line in lines for found in re.findall(r"fsd-(?:infer|bench) ([a-z-]+)((?: [^`#|]*)?)", line)]
    asked = [(name, option) for name, rest in called for option in re.findall(r"(?<=\s)--[a-z][a-z-]+", rest)]
    unknown = [
        pair for pair in asked if pair[0] in commands and pair[1] not in commands[pair[0]]._option_string_actions
    ]
    assert len(asked) > 30 and not unknown
    assert not [name for name, rest in called if rest and "--" in rest and name not in commands]


def raiser(error: BaseException) -> Any:
    def command() -> int:
        raise error

    return command


ERRORS = [
    (FsdError("a bad\n  thing: fix it"), BAD_INPUT, "prog: a bad thing: fix it"),
    (IsADirectoryError(21, "Is a directory", "there"), BAD_INPUT, "prog: there: Is a directory"),
    (OSError("no space"), BAD_INPUT, "prog: no space"),
    (MemoryError(), BAD_INPUT, "prog: out of memory: ask for less"),
    (ModuleNotFoundError(name="peft.tuners"), BAD_INPUT, "prog: the package peft is not installed: pip install"),
    (ModuleNotFoundError("use `pip install x`"), BAD_INPUT, "prog: use `pip install x`"),
    (KeyboardInterrupt(), INTERRUPTED, "prog: interrupted"),
    (TerminatedError(), 143, "prog: terminated"),
    (TerminatedError(signal.SIGHUP), 129, "prog: hung up"),
    (BrokenPipeError(32, "Broken pipe"), BROKEN_PIPE, ""),
]


@pytest.mark.parametrize(("error", "status", "line"), ERRORS)
def test_errors_are_one_line(error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prog", raiser(error)) == status
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == bool(line)


def test_a_bug_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("fsd-train fit", raiser(TypeError("no\nway"))) == UNEXPECTED
    err = capsys.readouterr().err
    assert err.startswith("fsd-train fit: unexpected TypeError: no way (a bug;") and err.count("\n") == 1
    file = Path(re.findall(r"is in (.*)\)", err)[0])
    assert file.parent == tmp_path and "raise error" in file.read_text()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert run("prog", raiser(TypeError("no"))) == UNEXPECTED
    assert "raise error" in (err := capsys.readouterr().err) and "traceback is in the lines above)" in err
    with pytest.raises(TypeError):
        run("prog", raiser(TypeError("no")), debug=True)


def test_a_pipe_that_closes_early_is_no_error() -> None:
    script = "from fsd_core.console import run; run('p', lambda: print('x\\n' * 10**6))"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.read(10)
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait() == 0


TWICE = """
import os, signal, sys, threading, time
from fsd_core.console import run

def again():
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != "_shutdown":  # the interpreter waits for this thread
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)

def work():
    threading.Thread(target=again).start()
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(run("prog", work))
"""


def test_a_second_ctrl_c_prints_nothing() -> None:
    child = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, check=False, timeout=60)
    assert (child.returncode, child.stderr) == (INTERRUPTED, "prog: interrupted\n")


def test_text_is_utf8_whatever_the_terminal_says(capsys: pytest.CaptureFixture[str]) -> None:
    script = "from fsd_infer.cli.commands import read_text; print(ascii(read_text('-')))"
    for shell, status, said in (
        ("printf '\\357\\273\\277\\303\\251' | {}", 0, b"'\\xe9'"),  # a byte order mark, and an é
        ("printf '\\351' | {}", 1, b"standard input: cannot be read as UTF-8 text"),
        ("{} <&-", 1, b"standard input: cannot be read as UTF-8 text"),
    ):
        command = shell.format(f'PYTHONIOENCODING=latin-1 {sys.executable} -c "{script}"')
        made = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert made.returncode == status and said in made.stdout
    record, stats = SimpleNamespace(sources=[0], relaxed=[False]), SimpleNamespace(to_dict=dict)
    answer = SimpleNamespace(records=[record], sequences=[[5]], texts=["\U0001f33b"], stats=stats)
    _show(argparse.Namespace(json=True, quiet=True), None, answer, streamed=False)
    out = capsys.readouterr().out
    assert out.isascii() and json.loads(out)["text"] == "\U0001f33b"


def test_a_dumb_terminal_gets_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal: Any = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    args = argparse.Namespace(show_accepted=True, color="auto")
    for name, dumb in (("xterm", False), ("dumb", True)):
        monkeypatch.setenv("TERM", name)
        assert use_colour("auto", terminal) is not dumb and use_colour("always", terminal)
        assert (_live_tokens(args, tiny_tokenizer()) is None) is dumb
    assert not use_colour("auto", io.StringIO())


OUTSIDE = [
    (positive, ["0", "-1", "1.5", "2147483648", "9" * 5000, "0_1", " 1", "\u0661", ""]),
    (thread_count, ["0", "100000"]),
    (real_number, ["much", "1e400", "1e-400", "nan", "0_1", "1\n", "0x1", "1,5"]),
    (gibibytes, ["0", "-1", "inf", "1e308"]),
    (whole_number(0, 5), ["-1", "6"]),
]


@pytest.mark.parametrize(("kind", "bad"), OUTSIDE)
def test_numbers_within_what_makes_sense(kind: Callable[[str], float], bad: list[str]) -> None:
    for text in bad:
        with pytest.raises(ArgumentTypeError):
            kind(text)
    assert [whole_number(-9, 9)("-7"), positive("007"), real_number(".5"), real_number("inf")] == [-7, 7, 0.5, math.inf]


MISSING = [
    ("matplotlib", "fsd_bench", "sweep --prompts none.jsonl --rules exact --output x", "bench"),
    ("scipy", "fsd_bench", "calibrate --prompts x --rules exact --at-most-nats 1 --output x", "bench"),
    ("lightning", "fsd_train", "fit --help", "train"),
    ("jsonargparse", "fsd_train", "fit --help", "train"),
]
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
from fsd_bench.cli import main as fsd_bench
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


INFER = ("generate", "serve", "warmup")
BENCH = ("run", "sweep", "calibrate")
HELP = {
    "fsd_infer.cli.main": [["--help"], *([name, "--help"] for name in INFER), ["generate", "--no-such-option"]],
    "fsd_bench.cli": [["--help"], *([name, "--help"] for name in BENCH), ["run", "--no-such-option"]],
    "fsd_train.cli": [["--help"], *([name, "--help"] for name in PARSERS), ["export", "--no-such-option"],
                      ["fit", "--modl.unroll_steps", "2"]],
}  # fmt: skip
HEAVY = """
import sys
from contextlib import suppress
from MODULE import main
for argv in CASES:
    with suppress(SystemExit):
        main(argv)
    heavy = {"torch", "transformers", "numpy", "lightning", "jsonargparse", "fsd_bench.runner"} & set(sys.modules)
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
