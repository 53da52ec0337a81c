"""Semi-greedy search against brute force, and `fsd-train label`: labels, resuming, bad input."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.judge_oracle import report
from fsd_bench.score import Reference
from fsd_infer import FuzzyDecoder
from fsd_infer.chat.encoding import encode_chat
from fsd_infer.errors import FsdError
from fsd_infer.rules import Verification
from fsd_train.cli import main as cli
from fsd_train.label import Labeller, Task
from fsd_train.semi_greedy import Change, SemiGreedy
from tests.bench_toys import Toy
from tests.text_toys import write_rows
from tests.tree_rounds import emitted, tree_round, verdict_of

Harmless = Callable[[Sequence[int]], bool]


def by_chance(seed: int) -> Harmless:
    """Is a change that ends this text harmless: a coin of each text's own."""
    return lambda text: random.Random(f"{seed} {list(text)}").random() < 0.6


def best_by_brute_force(round: Verification, row: int, harmless: Harmless, ends: frozenset[int]) -> list[int]:
    """What the row emits on the best of all ways through its tree, each of which is tried."""
    tokens, parents = round.tree.tokens[row].tolist(), round.tree.parents[row].tolist()
    scores = round.scores[row]
    ways = []
    for node in range(len(tokens)):
        path, at = [], node
        while at:
            path, at = [at, *path], parents[at]
        text, fine, regret = [tokens[0]], True, 0.0
        for step in path:
            above = scores[parents[step]]
            fine &= parents[step] == 0 or tokens[parents[step]] not in ends
            text.append(tokens[step])
            fine &= tokens[step] == int(above.argmax()) or harmless(text)
            regret += float(above.max() - above[tokens[step]])
        following = int(scores[node].argmax())
        if fine:
            ended = bool(node) and tokens[node] in ends
            ways.append(
                ((ended or following in ends, len(path), -regret), [*text[1:], *([] if ended else [following])])
            )
    return max(ways)[1]


@pytest.mark.parametrize("ends", [frozenset(), frozenset({3, 7})])
@pytest.mark.parametrize("step_by_step", [True, False])
def test_a_round_takes_the_best_way_of_all(ends: frozenset[int], step_by_step: bool) -> None:
    longer = 0
    for seed in range(12):
        round, harmless = tree_round(seed, greedy=True, vocab=9), by_chance(seed)

        def judge(changes: Sequence[Change], harmless: Harmless = harmless) -> list[bool]:
            return [harmless(change.text) for change in changes]

        verdict = verdict_of(SemiGreedy(judge, ends), round, step_by_step)
        exact = verdict_of(SemiGreedy(lambda changes: [False] * len(changes), ends), round, step_by_step)
        for row in range(round.tree.tokens.shape[0]):
            best = best_by_brute_force(round, row, harmless, ends)
            if best[-1] in ends:  # of ways that end the answer one is as good as another
                assert ends & set(emitted(verdict, row))
            else:
                assert emitted(verdict, row)[: len(best)] == best
            nothing = best_by_brute_force(round, row, lambda text: False, ends)
            assert emitted(exact, row)[: len(nothing)] == nothing
            longer += len(best) > len(nothing)
    assert longer > 10


def test_changes_of_too_much_regret_are_not_tried() -> None:
    round, asked = tree_round(0, greedy=True), []

    def judge(changes: Sequence[Change]) -> list[bool]:
        asked.extend(change.regret for change in changes)
        return [True] * len(changes)

    SemiGreedy(judge)(round)
    most = sorted(asked)[len(asked) // 2]
    asked.clear()
    SemiGreedy(judge, most_regret=most)(round)
    assert asked and max(asked) <= most
    with pytest.raises(FsdError, match="temperature 0"):
        SemiGreedy(judge)(tree_round(0))


@dataclass(frozen=True)
class Odd(Reference):
    """A score that half of all changes keep."""

    def score(self, answer: str) -> float:
        return float(sum(map(ord, answer)) % 2)


def tasks_of(decoder: FuzzyDecoder, reference: Reference | None) -> list[Task]:
    texts = ["the cat sat on the mat", "what is the answer to that", "it is there on the mat", "the end"]
    asked = [encode_chat(decoder.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    return [Task(str(number), "toy", prompt, reference) for number, prompt in enumerate(asked)]


def test_labels_are_what_the_target_says_after_each_change(toy_decoder: FuzzyDecoder) -> None:
    """Continued by transformers, one by one; and the searched answer has the harmless changes and no others."""
    labeller = Labeller(toy_decoder, 16, most_regret=50.0)
    tasks = tasks_of(toy_decoder, Odd("odd", ""))
    model, seen, compared = toy_decoder.target.model, set(), 0

    def greedy(prompt: list[int], ids: list[int]) -> list[int]:
        if ids and ids[-1] in labeller.ends or len(ids) == 16:
            return ids
        text = torch.tensor([prompt + ids])
        made = model.generate(
            text, attention_mask=torch.ones_like(text), max_new_tokens=16 - len(ids), do_sample=False,
            eos_token_id=sorted(labeller.ends), pad_token_id=0,
        )  # fmt: skip
        return made[0, len(prompt) :].tolist()

    def log_p(text: list[int], rest: list[int]) -> float:
        found = model(torch.tensor([text + rest])).logits[0, len(text) - 1 : -1].log_softmax(-1)
        return float(found.gather(1, torch.tensor(rest)[:, None]).mean())

    def score(ids: list[int]) -> float:
        return Odd("odd", "").score(labeller.tokenizer.decode(ids, skip_special_tokens=True))

    for task, line in zip(tasks, labeller.label(tasks), strict=True):
        assert line["exact"]["ids"] == greedy(task.prompt, [])
        kept = {}
        for change in line["changes"]:
            after = score(greedy(task.prompt, [*change["before"], change["token"]]))
            assert change["score"] == after and change["important"] == (after < line["exact"]["score"])
            without = greedy(task.prompt, change["before"])[len(change["before"]) :]
            assert change["choice"] == without[0] != change["token"]
            if rest := without[1:]:
                text = task.prompt + change["before"]
                loss = log_p([*text, change["choice"]], rest) - log_p([*text, change["token"]], rest)
                assert change["loss"] == pytest.approx(loss, abs=1e-3)
                compared += 1
            seen.add(change["important"])
            kept[(*change["before"], change["token"])] = not change["important"]
        searched = line["searched"]["ids"]
        text = torch.tensor([task.prompt + searched])
        choices = model(text).logits[0, len(task.prompt) - 1 : -1].argmax(-1).tolist()
        for place, (token, choice) in enumerate(zip(searched, choices, strict=True)):
            if token != choice:
                assert kept[tuple(searched[: place + 1])]
        assert line["searched"]["score"] >= line["exact"]["score"]
    assert seen == {True, False} and compared > 4


def command(toy: Toy, output: Path, *more: str) -> list[str]:
    options = ["--prompts", str(toy.prompts), "--output", str(output), "--max-new-tokens", "16", "--quiet"]
    return ["label", *toy.models, *options, "--by", "loss", "--batch-size", "2", *more]


def test_a_run_that_was_cut_anywhere_goes_on(toy: Toy, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    assert cli(command(toy, whole)) == 0
    raw = whole.read_bytes()
    lines = [json.loads(line) for line in raw.splitlines()]
    assert len({line["id"] for line in lines}) == 4 and sum(len(line["changes"]) for line in lines) > 4
    for change in (change for line in lines for change in line["changes"]):
        assert change["important"] == (change["loss"] is None or change["loss"] > 0.5)
    for cut in (7, len(raw) // 2):
        part = tmp_path / f"{cut}.jsonl"
        part.write_bytes(raw[:cut])
        part.with_suffix(".meta.json").write_bytes(whole.with_suffix(".meta.json").read_bytes())
        assert cli(command(toy, part)) == 0
        assert part.read_bytes() == raw


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--by", "score"], "has no reference to score by: give --by loss"),
        (["--most-loss", "-1"], "most_loss must be at least 0 nats, got -1.0"),
        (["--most-regret", "-1"], "most_regret must be at least 0"),
        (["--tree", "3,x"], "a tree is written depth,width,nodes"),
        (["--max-new-tokens", "9999"], "exceed the target's context of 256"),
        (["--drafter", "nowhere"], "unknown drafter 'nowhere'"),
        (["--score", "number"], "no row has a reference for --score number"),
    ],
)
def test_bad_input(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    assert cli(command(toy, tmp_path / "x.jsonl", *more)) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_in_the_way(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, output = toy.prompts.read_text(), tmp_path / "x.jsonl"
    empty = str(write_rows(tmp_path / "empty.jsonl", []))
    assert cli(command(toy, output, "--limit-per-file", "1")) == 0
    capsys.readouterr()
    for argv, words in [
        (command(toy, output, "--prompts", empty), "no prompts"),
        (command(toy, output, "--limit-per-file", "2"), "limit_per_file was 1, now 2"),
        (command(toy, toy.prompts), "has rows but no prompts.meta.json"),  # prompts are not labels
    ]:
        assert cli(argv) == 2 and words in capsys.readouterr().err
    assert toy.prompts.read_text() == before


def test_the_table_of_the_findings_is_what_the_record_says(repo_root: Path) -> None:
    record = json.loads((repo_root / "benchmarks" / "results" / "judge-oracle.json").read_text("utf-8"))
    page = (repo_root / "docs" / "findings.md").read_text("utf-8").splitlines()
    shown = {line for line in page if line.startswith(("| three-step, ", "| multiarith + svamp + gsm8k, "))}
    assert len(shown) == 12 and shown <= set(report(record).splitlines())
