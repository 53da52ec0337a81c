"""Tests of `fsd-infer` through main(argv), on a tiny saved model."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from fsd_infer import FuzzyDecoder
from fsd_infer.chat.pieces import token_pieces
from fsd_infer.cli.main import build_parser, main
from fsd_infer.cli.report import COLOURS, RESET, show_accepted, use_colour
from fsd_infer.divergence import DIVERGENCES
from fsd_infer.rules import RULES, Source
from tests.bench_toys import Toy
from tests.fuzzing import called
from tests.text_toys import tiny_tokenizer, write_rows

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


def test_prompt_from_file_and_standard_input_and_raw(
    toy: Toy, toy_decoder: FuzzyDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    options = [*toy.models, "--max-new-tokens", "8", "--json"]
    chat, raw = (
        toy_decoder.generate(PROMPT, max_new_tokens=8, temperature=0, chat=chat).sequences[0] for chat in (None, False)
    )
    assert chat != raw
    assert json.loads(call("generate", "--prompt-file", str(file), *options)[1])["tokens"] == chat
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert json.loads(call("generate", "--prompt-file", "-", "--raw", *options)[1])["tokens"] == raw


def test_sampling_follows_the_seed(toy: Toy, toy_decoder: FuzzyDecoder) -> None:
    options = ["--temperature", "0.9", "--top-p", "0.9", "--max-new-tokens", "12", "--json"]
    found = [json.loads(generate(toy, *options, "--seed", seed)[1])["tokens"] for seed in "34"]
    expected = toy_decoder.generate(PROMPT, do_sample=True, temperature=0.9, top_p=0.9, max_new_tokens=12, seed=3)
    assert found[0] == expected.sequences[0] != found[1]


def test_shown_marks_and_colours_are_the_sources(toy: Toy, toy_decoder: FuzzyDecoder) -> None:
    options = ["--rule", "fuzzy:js:0.2", "--max-new-tokens", "40", "--show-accepted", "--seed", "0"]
    # a lossy rule's text follows from its trees, which with a seed follow from the text and not from the clock
    made = toy_decoder.generate(PROMPT, "fuzzy:js:0.2", max_new_tokens=40, temperature=0, seed=0)
    sources, pieces = made.records[0].sources, token_pieces(toy_decoder.tokenizer, made.sequences[0])
    assert set(sources) == {0, 1, 2}, "the toy shows every source"
    marks = generate(toy, *options)[1]  # stdout is no terminal
    assert marks.startswith(show_accepted(pieces, sources, colour=False) + "\n") and "\x1b" not in marks
    out = generate(toy, *options, "--color", "always")[1]
    shown, _, legend = out.rpartition("\n" + "tokens by source: ")
    assert all(meaning in legend for meaning in ("target", "exact acceptance", "open gate"))

    found, state, rest = [], Source.TARGET, shown
    codes = {COLOURS[Source.EXACT]: Source.EXACT, COLOURS[Source.GATE]: Source.GATE, RESET: Source.TARGET}
    while rest:
        code = next((code for code in codes if rest.startswith(code)), None)
        if code is not None:
            state, rest = codes[code], rest[len(code) :]
        else:
            found.append((rest[0], state))
            rest = rest[1:]
    assert found == [(char, source) for piece, source in zip(pieces, sources, strict=True) for char in piece]
    assert "".join(char for char, _ in found) == made.texts[0]


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show_accepted(["a", " b", "", "c"], [0, 1, 1, 2], colour=False) == "a[ b][]{c}"
    terminal, file = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert use_colour("auto", terminal) and not use_colour("never", terminal) and not use_colour("auto", file)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_colour("auto", terminal) and use_colour("always", terminal)


def test_pieces_never_cut_a_character() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("the é sat")["input_ids"]
    pieces = token_pieces(tokenizer, [*ids, tokenizer.eos_token_id])
    assert "".join(pieces) == "the é sat" and len(pieces) == len(ids) + 1
    assert pieces.count("") >= 2  # the first byte of é, and the end token
    assert token_pieces(tokenizer, []) == []


@pytest.mark.parametrize("drafter", ["none", "small-lm+lookup"])
def test_warmup_takes_any_drafter(toy: Toy, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("fsd_infer.cpu.ops.kernel_kind", lambda: asked.append(True))
    names = drafter.replace("small-lm", str(toy.drafter))
    models = ["--target", str(toy.target), "--dtype", "fp32", "--device", "cpu"]
    status, out, err = call("warmup", *models, "--drafter", names)
    assert status == 0 and asked, "warmup compiles the kernels"
    assert "CPU kernels: none" in out
    parts = [part.split()[0] for part in err.strip().split(", ")]
    assert parts == ["compile", "load", "pack"]


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
    "no such device": (["--device", "abacus"], "has no such name"),
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


def test_caches_beyond_the_limit_are_refused(toy: Toy) -> None:
    request = ["--max-new-tokens", "4", "--max-cache-gib"]
    status, out, err = generate(toy, *request, "1e-6")
    assert status == 2 and not out and "allows 1073 bytes" in err and "smaller max_new_tokens" in err
    assert generate(toy, *request, "1")[0] == 0
    assert "above 0" in generate(toy, *request, "0")[2]


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
