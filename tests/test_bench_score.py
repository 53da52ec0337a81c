"""Task scores: what counts as a right answer, and their intervals in records and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsd_bench.base import Comparison, MeasuredAnswer, TimedRun
from fsd_bench.cli import main
from fsd_bench.record import BenchPrompt, build_record
from fsd_bench.score import SCORES, first_option, last_number, other_language, read_references, rouge_l
from fsd_core import options
from fsd_core.errors import DataError, FsdError
from fsd_core.text.encoding import PromptRow
from tests.bench_toys import Toy, save_toy
from tests.openai_server import Behaviour, serving
from tests.text_toys import tiny_tokenizer, write_rows

FORMAT = "Please choose the answer.\n\nAnswer1: a Answer2: b\n\nAnswer format: answer1/answer2/answer3"


NUMBERS = [
    ("She makes 9 * 2 = $18 every day.", 18), ("so 333.0", 333), ("1,450,000 in all", 1450000), ("16-3", 3),
    ("x = -10.", -10), ("that is \N{MINUS SIGN}2.50 euros", -2.5), ("(4)-1", 1), ("1, 2,3", 3), ("**42**", 42),
    ("12,5000", 5000), ("none", None), ("", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_the_last_number(text: str, number: float | None) -> None:
    found = last_number(text)
    assert (None if found is None else float(found)) == number


OPTIONS = [
    ("The correct answer is answer3, not answer1.", "answer3"), ("Answer 2", "answer2"), ("answer12", None),
    ("I think that answer1answer2", None), ("**ANSWER2**", "answer2"), ("a case of B.", "B"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "option"), OPTIONS)
def test_the_first_option_named(text: str, option: str | None) -> None:
    """In any letters, but that options of one letter keep theirs."""
    assert first_option(text, ("answer1", "answer2", "answer3", "A", "B")) == option


def row(answer: Any, prompt: str = "how many?") -> PromptRow:
    return PromptRow("id", [{"role": "user", "content": prompt}], "s", "f", 1, {"answer": answer})


def test_references_by_what_rows_hold() -> None:
    numbers = [row("4 + 14 = 18\n#### 1,018"), row("8.0"), row(7)]
    choices = [row("answer2", FORMAT), row("True"), row("no")]
    rows = [*numbers, *choices, row("Paris"), row(None), row("answer9", FORMAT), row(["x"])]
    found = read_references(rows)
    assert [None if r is None else (r.kind, str(r.value)) for r in found] == [
        ("number", "1018"), ("number", "8.0"), ("number", "7"), ("choice", "answer2"), ("choice", "true"),
        ("choice", "no"), None, None, None, None,
    ]  # fmt: skip
    assert not any(read_references(choices[1:] + numbers, "number")[:2]) and not any(read_references(rows, "none"))
    assert found[1] is not None and found[1].score("it is 8") == 1.0 and found[1].score("8 or 9") == 0.0
    assert found[4] is not None and found[4].score("True.") == 1.0 and found[4].score("untrue") == 0.0
    with pytest.raises(DataError, match="no row has a reference for --score choice"):
        read_references(numbers, "choice")
    with pytest.raises(FsdError, match="unknown score 'bleu'"):
        read_references(rows, "bleu")
    assert options.SCORES == SCORES, "what the command line offers"


def test_means_and_paired_differences() -> None:
    def scored(score: float | None, likelihood: float, tokens: int) -> TimedRun:
        answer = MeasuredAnswer(list(range(tokens)), tokens - 1, tokens - 1, log_likelihood=likelihood, score=score)
        return TimedRun(1.0, 0.1, [answer])

    prompts = [BenchPrompt(str(i), "a", f"f:{i}", [1]) for i in range(4)]
    ours, theirs = [1.0, 0.0, 1.0, None], [1.0, 1.0, 1.0, None]
    runs = [{"plain": scored(theirs[i], -1.0, 4), "lossy": scored(ours[i], -1.0 - i, 2 + i)} for i in range(4)]
    comparisons = [Comparison(i, 0, [i], each) for i, each in enumerate(runs)]
    record = build_record(prompts, {"plain": {}, "lossy": {}}, comparisons, seed=3)
    lossy, less = record["methods"]["lossy"], record["differences"]["plain"]["lossy"]
    assert record["methods"]["plain"]["score"] == 1.0 and lossy["intervals"]["score"]["prompts"] == 3
    assert lossy["intervals"]["score"]["mean"] == lossy["score"] == pytest.approx(2 / 3)
    assert less["score"]["mean"] == pytest.approx(-1 / 3) and less["score"]["low"] >= -1 and less["score"]["high"] == 0
    likelihood = lossy["intervals"]["log_likelihood_per_token"]
    assert likelihood["mean"] == pytest.approx(lossy["log_likelihood_per_token"]) and likelihood["prompts"] == 4
    assert likelihood["mean"] == pytest.approx(-(1 * 2 + 2 * 3 + 3 * 4 + 4 * 5) / 14)
    assert less["log_likelihood_per_token"]["mean"] == pytest.approx(likelihood["mean"] + 1)


def test_rouge_l() -> None:
    assert rouge_l("The cat sat.", "the CAT sat") == 1.0 and rouge_l("", "a") == rouge_l("a", "b") == 0.0
    # longest common subsequence police the gunman: 3 of 4 words here, of 4 words there
    assert rouge_l("police ended the gunman", "police kill the gunman") == pytest.approx(3 / 4)
    assert rouge_l("a b c d e f", "f a c") == pytest.approx(2 * 2 / 9)
    rows = [PromptRow("i", [{"role": "user", "content": "x"}], "s", "f", 1, {"reference": ["b b", "a c"]}), row("a b")]
    found = read_references(rows, "rouge")
    assert found[0] is not None and found[0].score("a c") == 1.0 and found[1] is not None
    assert not any(read_references(rows, "auto")), "texts are compared only where that is asked for"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A target that says 7 whatever it is asked: its layers add nothing, and its head likes that token alone."""
    toy = save_toy(tmp_path_factory.mktemp("sevens"))
    model = AutoModelForCausalLM.from_pretrained(toy.target, dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
        layer.self_attn.o_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data[:, 0] = 9.0
    model.lm_head.weight.data.zero_()
    model.lm_head.weight.data[tiny_tokenizer()("7", add_special_tokens=False).input_ids[0], 0] = 5.0
    model.save_pretrained(toy.target)
    rows = [{"question": "the cat?", "answer": "#### 77"}, {"question": "that?", "answer": "7"}, {"prompt": "it is"}]
    write_rows(toy.prompts, rows)
    return toy


def test_bench_scores_what_has_a_reference(toy: Toy, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    argv = ["bench", "--prompts", str(toy.prompts), "--max-new-tokens", "2", "--no-warmup", *toy.models]
    argv += ["--json", str(file), "--overwrite", "--methods"]
    with serving(Behaviour(lambda prompt, limit: [5] * limit, tells_ids=False, text=" 7")) as url:
        assert main([*argv, f"hf-generate,plain,theirs=server:{url}", "--log-likelihood"]) == 0
    record = json.loads(file.read_text())
    assert record["methods"]["plain"]["score"] == record["methods"]["hf-generate"]["score"] == 0.5
    assert record["methods"]["theirs"]["score"] == 0.5  # it is right where plain is wrong, and the reverse
    assert record["differences"]["plain"]["theirs"]["score"] == {"mean": 0, "low": -1, "high": 1, "prompts": 2}
    assert record["differences"]["hf-generate"]["plain"]["score"] == {"mean": 0, "low": 0, "high": 0, "prompts": 2}
    assert record["methods"]["theirs"]["log_likelihood_per_token"] < -1, "of the text's own tokens"
    shown = capsys.readouterr().out
    assert "50.0 [0.0, 100.0]" in shown and "score: of 2 prompts with a reference" in shown
    assert max(map(len, shown.splitlines())) <= 100

    assert main([*argv, "plain", "--score", "none"]) == 0
    record = json.loads(file.read_text())
    assert record["methods"]["plain"]["score"] is None and "score" not in record["methods"]["plain"]["intervals"]
    assert "score" not in capsys.readouterr().out
    assert main([*argv, "plain", "--score", "choice"]) == 2
    assert "no row has a reference for --score choice" in capsys.readouterr().err


def test_instructions_are_checked_by_their_programs() -> None:
    asked = {"prompt": "Answer in lowercase, without commas.", "kwargs": [{}, {}]}
    asked["instruction_id_list"] = ["change_case:english_lowercase", "punctuation:no_comma"]
    row = PromptRow("", [{"role": "user", "content": asked["prompt"]}], "", "f", 1, asked)
    for kind in ("auto", "ifeval"):
        (reference,) = read_references([row], kind)
        assert reference is not None and reference.kind == "ifeval"
        assert reference.score("the cat sat on the mat and it was a fine day") == 1.0
        assert reference.score("the cat, sat on the mat and it was a fine day") == 0.0


ODD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"instruction_id_list": ["change_case:nonsense"], "kwargs": [{}]}, "knows no instruction 'change_case:nonsense'"),
    ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "check its kwargs"),
    ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": 3}]}, "check its kwargs"),
    ({"scored_by": "letters", "answer": "A"}, "`scored_by` is 'letters'. Known: letter"),
    ({"scored_by": "letter", "letters": "ABCD"}, "cannot be scored by letter"),
    ({"scored_by": "letter", "answer": "A", "letters": 5}, "cannot be scored by letter"),
    ({"scored_by": "code", "answer": "print(1)"}, "cannot be scored by code"),
    ({"scored_by": "code", "answer": '{"tests": []}'}, "cannot be scored by code"),
]


@pytest.mark.parametrize(("fields", "message"), ODD_ROWS)
def test_what_cannot_be_scored_is_told_before_the_answers(fields: dict[str, Any], message: str) -> None:
    row = PromptRow("", [{"role": "user", "content": "say it"}], "", "f", 1, {"prompt": "say it", **fields}, "f:1")
    with pytest.raises(DataError, match=f"f:1: .*{message}"):
        read_references([row], run_code=True)


def test_answers_that_no_score_uses_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """A column of answers that is left out in silence looks like a run without references."""
    rows = [row("#### 42"), row("Paris"), row(""), row(None)]
    assert [reference is not None for reference in read_references(rows)] == [True, False, False, False]
    assert capsys.readouterr().err == "notice: 1 of 2 answers are not scored: --score auto cannot use them.\n"
    read_references(rows, "none")
    assert not capsys.readouterr().err


def test_translations_are_scored_by_characters_and_language() -> None:
    source, wanted = "Das Haus ist alt und die Katze schläft.", "The house is old and the cat is sleeping."
    row = PromptRow("", [{"role": "user", "content": source}], "", "f", 1, {"reference": [wanted]})
    (reference,) = read_references([row], "chrf")
    assert reference is not None and read_references([row]) == [None]
    scores = [reference.score(text) for text in (wanted, "The house is old, the cat sleeps.", source)]
    assert scores[0] == pytest.approx(1.0) and scores[0] > scores[1] > scores[2]
    assert [other_language(text, [wanted]) for text in (wanted, source)] == [False, True]
