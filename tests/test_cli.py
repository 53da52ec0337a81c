"""Tests of `fsd-infer` through main(argv), on a tiny saved model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fsd_infer import FuzzyDecoder
from fsd_infer.cli.main import build_parser, main
from fsd_infer.divergence import DIVERGENCES
from fsd_infer.rules import RULES, Source
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
