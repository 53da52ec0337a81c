"""Regenerating answers: resumable without loss or duplicates, locally and by an endpoint."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ALL_COMPLETED
from itertools import count
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from fsd_bench.openai_client import EXTENSIONS, UNSHAPED
from fsd_infer.chat.encoding import encode_chat
from fsd_infer.errors import FsdError
from fsd_train.backends import Answer, EndpointBackend, Job
from fsd_train.cli import main as cli
from fsd_train.plan import answer_line, pick_temperature, plan_jobs
from fsd_train.regenerate import AnswerFile
from tests.openai_server import Reply, replying
from tests.text_toys import CHATML, save_tiny_chat_target, tiny_tokenizer, write_rows

WORDS = "the cat sat on the mat what is the answer to that it is there".split()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_target(tmp_path_factory.mktemp("target"))


def prompts_file(directory: Path, count: int, name: str = "p.jsonl") -> Path:
    texts = [" ".join(WORDS[i % 5 : i % 5 + 1 + i % 7]) + f" {i}" for i in range(count)]
    return write_rows(directory / name, [{"prompt": text} for text in texts])


def main(argv: list[str]) -> int:
    return cli(["regenerate", *argv])


def command(target: Path, prompts: Path, output: Path, *more: str) -> list[str]:
    return [
        "--target", str(target), "--prompts", str(prompts), "--output", str(output), "--dtype", "float32",
        "--device", "cpu", "--max-new-tokens", "12", "--batch-size", "4", "--quiet", *more,
    ]  # fmt: skip


def read(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {row["id"]: row for row in rows}
    assert len(by_id) == len(rows), "an id was written twice"
    return by_id


def test_answers_are_the_targets_own(tmp_path: Path, target: Path) -> None:
    output = tmp_path / "out"
    assert main(command(target, prompts_file(tmp_path, 9), output)) == 0
    rows = read(output / "answers.jsonl")
    assert len(rows) == 9
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = tiny_tokenizer()
    reasons = set()
    for row in rows.values():
        assert row["prompt_ids"] == encode_chat(tokenizer, row["messages"])
        ids = torch.tensor([row["prompt_ids"]])
        alone = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        assert row["response_ids"] == alone  # batching and padding change nothing
        assert row["response"] == tokenizer.decode(alone, skip_special_tokens=True)
        ended = alone[-1] == tokenizer.eos_token_id
        assert row["finish_reason"] == ("stop" if ended else "length")
        assert ended or len(alone) == 12
        reasons.add(row["finish_reason"])
    assert (row["temperature"], row["source"], row["ids_from"]) == (0.0, "p", "target")


def test_nothing_but_the_temperature_shapes_the_answers(tmp_path: Path, target: Path) -> None:
    prompts, expected = prompts_file(tmp_path, 6), tmp_path / "expected.jsonl"
    assert main(command(target, prompts, expected, "--temperature", "0", "0.9")) == 0
    shaping = save_tiny_chat_target(tmp_path / "shaping")
    config = GenerationConfig.from_pretrained(shaping)
    config.update(do_sample=True, top_k=2, min_p=0.5, repetition_penalty=1.5, no_repeat_ngram_size=1)
    config.save_pretrained(shaping)
    assert main(command(shaping, prompts, tmp_path / "a.jsonl", "--temperature", "0", "0.9")) == 0
    assert read(tmp_path / "a.jsonl") == read(expected)


def test_drafts_change_no_answer_and_are_noted(tmp_path: Path, target: Path) -> None:
    prompts, plain, drafted = prompts_file(tmp_path, 9), tmp_path / "plain.jsonl", tmp_path / "drafted.jsonl"
    assert main(command(target, prompts, plain)) == 0
    assert main(command(target, prompts, drafted, "--drafter", "lookup")) == 0
    assert read(drafted) == read(plain)
    notes = [json.loads(path.with_suffix(".meta.json").read_text()) for path in (plain, drafted)]
    assert [(note["rule"], note["drafter"]) for note in notes] == [("exact", "none"), ("exact", "lookup")]


# recycling drafts by what earlier requests saw, which a resumed run has not seen
@pytest.mark.parametrize(("temperature", "drafter"), [("0", "none"), ("0.9", "none"), ("0.9", "recycle")])
def test_resumes_exactly_from_any_cut(tmp_path: Path, target: Path, temperature: str, drafter: str) -> None:
    prompts = prompts_file(tmp_path, 14)
    whole = tmp_path / "whole.jsonl"
    options = ["--temperature", temperature, "--drafter", drafter]
    assert main(command(target, prompts, whole, *options)) == 0
    expected, raw = read(whole), whole.read_bytes()
    for cut in (0, 1, len(raw) // 3, len(raw) // 2 + 1, len(raw) - 1, len(raw)):
        part = tmp_path / f"cut{cut}.jsonl"
        part.write_bytes(raw[:cut])  # what a killed run leaves: whole lines and at most one torn one
        part.with_suffix(".meta.json").write_text(whole.with_suffix(".meta.json").read_text())
        assert main(command(target, prompts, part, *options)) == 0
        assert read(part) == expected


def killed_run(batches: int, share: float, argv: list[str]) -> None:
    """`fsd-train regenerate`; kills its process when so many batches are written, and this share of the next one."""
    append, calls = AnswerFile.append, count()

    def last(self: AnswerFile, file: IO[bytes], written: Sequence[bytes]) -> None:
        if next(calls) < batches:
            return append(self, file, written)
        lines = b"".join(written)
        os.write(file.fileno(), lines[: int(share * len(lines))])
        os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(AnswerFile, "append", last):
        cli(["regenerate", *argv])


def test_sigkilled_run_resumes_without_loss_or_duplicates(tmp_path: Path, target: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    draw = random.Random(seed)
    batches, share = draw.randrange(1, 20), draw.random()
    print(f"seed {seed}: killed in batch {batches} at {share:.3f}")  # shown where the test fails
    prompts = prompts_file(tmp_path, 40)
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    program = f"import sys; from tests.test_regenerate import killed_run as run; run({batches}, {share}, sys.argv[1:])"
    run = [sys.executable, "-c", program, *command(target, prompts, killed, "--batch-size", "2")]
    process = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert 2 * batches <= killed.read_bytes().count(b"\n") < 40
    assert main(command(target, prompts, killed, "--batch-size", "2")) == 0
    assert main(command(target, prompts, whole, "--batch-size", "2")) == 0
    assert read(killed) == read(whole)
    assert len(read(whole)) == 40


def test_other_settings_are_refused(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, output = prompts_file(tmp_path, 3), tmp_path / "a.jsonl"
    assert main(command(target, prompts, output)) == 0
    before = output.read_bytes()
    assert main(command(target, prompts, output, "--seed", "5")) == 2
    assert "seed was 0, now 5" in capsys.readouterr().err
    prompts_file(tmp_path, 4)
    assert main(command(target, prompts, output)) == 2
    assert "prompts was" in capsys.readouterr().err
    output.with_suffix(".meta.json").unlink()
    assert main(command(target, prompts, output)) == 2
    assert "no a.meta.json" in capsys.readouterr().err
    assert output.read_bytes() == before


def test_every_prompt_file_of_one_name_counts(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = prompts_file(tmp_path / "a", 3), prompts_file(tmp_path / "b", 2)
    argv = command(target, first, tmp_path / "a.jsonl", "--prompts", str(first), str(second))
    assert main(argv) == 0 and main(argv) == 0
    capsys.readouterr()
    prompts_file(tmp_path / "a", 4)
    assert main(argv) == 2
    assert "prompts was" in capsys.readouterr().err


def test_a_file_in_use_is_refused(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    prompts, output = prompts_file(tmp_path, 2), tmp_path / "a.jsonl"
    with open(output, "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(command(target, prompts, output)) == 2
    assert "another run is writing it" in capsys.readouterr().err


def test_bad_rows_are_told_with_file_and_line(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = prompts_file(tmp_path, 2)
    prompts.write_text(prompts.read_text() + "{\n")
    assert main(command(target, prompts, tmp_path / "a.jsonl")) == 2
    assert f"{prompts}:3: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "a.jsonl").exists()


def test_prompts_beyond_the_context_are_refused(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-new-tokens", "250", "--max-prompt-tokens", "100"]
    assert main(command(target, prompts_file(tmp_path, 2), tmp_path / "a.jsonl", *options)) == 2
    assert "exceed the target's context of 256" in capsys.readouterr().err


def test_plan_limits_lengths_and_order(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    first, second = prompts_file(tmp_path, 30, "a.jsonl"), prompts_file(tmp_path, 20, "b.jsonl")
    options: dict[str, Any] = {"max_prompt_tokens": 18, "batch_size": 4, "seed": 3}
    full = plan_jobs([first, second], tokenizer, **options)
    lengths = [len(job.prompt_ids) for batch in full.batches for job in batch]
    assert full.read == 50 and full.too_long == 50 - len(lengths) > 0 and max(lengths) <= 18
    assert all(len(batch) <= 4 for batch in full.batches)
    limited = plan_jobs([first, second], tokenizer, limit=10, **options)
    assert sum(map(len, limited.batches)) == 10
    assert limited.ids < full.ids
    assert plan_jobs([first, first], tokenizer, **options).ids == plan_jobs([first], tokenizer, **options).ids
    assert plan_jobs([first, second], tokenizer, **{**options, "seed": 4}).batches != full.batches


def test_temperatures_follow_their_weights() -> None:
    drawn = [pick_temperature(f"row{i}", [(0.0, 0.7), (0.8, 0.3)]) for i in range(4000)]
    # ids are fixed, so the share is too; 4 standard deviations of a binomial around 0.3
    assert abs(drawn.count(0.8) / 4000 - 0.3) < 4 * (0.3 * 0.7 / 4000) ** 0.5
    assert drawn == [pick_temperature(f"row{i}", [(0.0, 0.7), (0.8, 0.3)]) for i in range(4000)]


def completion(body: dict[str, Any], number: int = 0, **more: Any) -> tuple[int, Any]:
    ids = [5 + body["prompt"][-7] % 50, 60, 0]
    choice = {"text": "it is", "finish_reason": "stop", "token_ids": ids, "prompt_token_ids": body["prompt"], **more}
    return 200, {"choices": [choice]}


def job(index: int = 0, temperature: float = 0.0) -> Job:
    messages: Any = [{"role": "user", "content": f"the cat {index}"}]
    return Job(f"id{index}", messages, encode_chat(tiny_tokenizer(), messages), temperature, "p")


def backend(
    url: str | list[str], template: str = CHATML, config: GenerationConfig | None = None, **options: Any
) -> EndpointBackend:
    chosen = {"seed": 1, "pause": 0.001, "concurrency": 4, **options}
    return EndpointBackend(url, "toy", tiny_tokenizer(template), config, 12, **chosen)


def test_endpoint_sends_ids_and_takes_ids(tmp_path: Path, target: Path) -> None:
    prompts, output = prompts_file(tmp_path, 20), tmp_path / "a.jsonl"
    second = threading.Event()

    def held(body: dict[str, Any], number: int) -> tuple[int, Any]:
        second.wait(30)  # so that two requests are in flight at once
        return completion(body)

    def prompt(body: dict[str, Any], number: int) -> tuple[int, Any]:
        second.set()
        return completion(body)

    with replying(held) as (url, asked), replying(prompt) as (other, asked_too):
        options = ["--endpoint", url, other + "/v1", "--endpoint-model", "toy", "--temperature", "0", "0.8"]
        assert main(command(target, prompts, output, *options)) == 0
        rows = read(output)
        assert len(rows) == 20 and len(asked) + len(asked_too) == 20 and asked and asked_too
        assert main(command(target, prompts, output, *options)) == 0
        assert len(asked) + len(asked_too) == 20  # nothing is asked twice
    requests = {tuple(request["prompt"]): request for request in asked + asked_too}
    for row in rows.values():
        request = requests[tuple(row["prompt_ids"])]
        assert request["path"] == "/v1/completions" and request["model"] == "toy" and request["max_tokens"] == 12
        assert request["temperature"] == row["temperature"]
        assert {**request, **UNSHAPED, **EXTENSIONS} == request
        assert (request["top_k"], request["min_p"], request["repetition_penalty"]) == (-1, 0, 1)
        assert ("seed" in request) == (row["temperature"] > 0)
        assert row["response_ids"] == [5 + row["prompt_ids"][-7] % 50, 60, 0] and row["ids_from"] == "target"


def test_endpoint_without_ids_is_told_in_the_row() -> None:
    tokenizer = tiny_tokenizer()
    with replying(lambda body, n: completion(body, token_ids=None, prompt_token_ids=None)) as (url, _):
        answer = backend(url).ask(job(), backend(url).servers[0])
    assert answer.ids_from == "text"
    assert answer.response_ids == tokenizer("it is")["input_ids"] + [tokenizer.eos_token_id]


# as under Gemma's, a turn ends by another token (2) than the tokenizer's eos (0)
PAD_ENDS_TURNS = CHATML.replace("<|end|>", "<|pad|>")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ({"token_ids": [50, 51, 2]}, [50, 51, 2]),  # the template's end of turn
        ({"token_ids": [50, 51, 60]}, [50, 51, 60]),  # one of the generation config's
        ({"token_ids": [50, 51, 0]}, [50, 51, 0]),  # the tokenizer's eos
        ({"token_ids": [50, 51, 61], "stop_reason": 61}, [50, 51, 61]),  # one that the server alone knows
        ({"token_ids": [50, 51], "stop_reason": 60}, [50, 51, 60]),
        ({"token_ids": [50, 51], "matched_stop": 60}, [50, 51, 60]),
        ({"token_ids": [50, 51], "stop_reason": None}, [50, 51, 2]),
        ({"token_ids": [50, 51], "stop_reason": "text"}, [50, 51, 2]),
        ({"token_ids": []}, [2]),
        ({"token_ids": [50, 51], "stop_reason": 60, "finish_reason": "length"}, [50, 51]),
    ],
)
def test_endpoint_answers_end_with_the_token_that_ended_them(reply: dict[str, Any], expected: list[int]) -> None:
    config = GenerationConfig(eos_token_id=[0, 60])
    with replying(lambda body, n: completion(body, **reply)) as (url, _):
        asking = backend(url, PAD_ENDS_TURNS, config)
        assert asking.ask(job(), asking.servers[0]).response_ids == expected


@pytest.mark.parametrize("kept_in", ["generation_config.json", "config.json", ""])
def test_endpoint_reads_the_targets_end_tokens(tmp_path: Path, kept_in: str) -> None:
    target = save_tiny_chat_target(tmp_path / "target")
    for name in {"generation_config.json", "config.json"} - {kept_in}:
        (target / name).unlink()
    if kept_in:
        facts = json.loads((target / kept_in).read_text())
        (target / kept_in).write_text(json.dumps({**facts, "eos_token_id": [0, 60]}))
    prompts, output = prompts_file(tmp_path, 1), tmp_path / "a.jsonl"
    with replying(lambda body, n: completion(body, token_ids=[50, 60])) as (url, _):
        assert main(command(target, prompts, output, "--endpoint", url)) == 0
    [row] = read(output).values()
    assert row["response_ids"] == ([50, 60] if kept_in else [50, 60, 0])


def test_an_endpoint_that_fails_keeps_what_is_done() -> None:
    def dying(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return completion(body) if number <= 3 else (500, {"error": "out of memory"})

    with replying(dying) as (url, _):
        got: list[str] = []
        with pytest.raises(FsdError, match=r"status 500: .*out of memory.* after 3 tries. Finished"):
            for group in backend(url, concurrency=1, attempts=3).answer([[job(i) for i in range(5)]], set()):
                got += [answer.job.id for answer in group]
    assert got == ["id0", "id1", "id2"]


def test_endpoint_keeps_answers_that_come_with_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing_the_first(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return (404, {"error": "no such model"}) if body["prompt"] == job(0).prompt_ids else completion(body)

    monkeypatch.setattr("fsd_train.backends.FIRST_COMPLETED", ALL_COMPLETED)  # all land together
    with replying(refusing_the_first) as (url, _):
        got: list[str] = []
        with pytest.raises(FsdError, match="no such model"):
            for group in backend(url, concurrency=3).answer([[job(i) for i in range(6)]], set()):
                got += [answer.job.id for answer in group]
    assert got == ["id1", "id2", "id3", "id4", "id5"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_endpoint_keeps_answers_and_waits_for_none_when_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    second, over = threading.Event(), threading.Event()

    def held(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if number == 2:
            second.set()
            over.wait(30)
        return completion(body)

    def stopped(*_: Any, **__: Any) -> None:
        assert second.wait(30)
        raise error

    monkeypatch.setattr("fsd_train.backends.wait", stopped)
    with replying(held) as (url, asked):
        before = set(threading.enumerate())
        got: list[str] = []
        with pytest.raises(error):
            for group in backend(url, concurrency=1).answer([[job(i) for i in range(9)]], set()):
                got += [answer.job.id for answer in group]
        left = set(threading.enumerate()) - before
        assert all(thread.daemon for thread in left)  # for which the interpreter does not wait at its end
        over.set()
        for thread in left:
            thread.join(30)
    assert got == ["id0"] and len(asked) == 2  # one request at a time: the second came when the first was answered


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (lambda body, n: (200, {"result": 1}), "not a completion"),
        (lambda body, n: completion(body, prompt_token_ids=[1]), "changed the prompt's token ids"),
    ],
)
def test_endpoint_errors_that_no_retry_mends(reply: Reply, problem: str) -> None:
    with replying(reply) as (url, asked):
        with pytest.raises(FsdError, match=problem):
            backend(url).ask(job(), backend(url).servers[0])
    assert len(asked) == 1


def test_some_endpoint_is_needed() -> None:
    with pytest.raises(FsdError, match="no endpoint"):
        backend([])


def test_answers_of_other_programs_are_not_appended_to(tmp_path: Path, target: Path) -> None:
    prompts, output = prompts_file(tmp_path, 2), tmp_path / "a.jsonl"
    assert main(command(target, prompts, output)) == 0
    output.write_text('{"text": "mine"}\n')
    assert main(command(target, prompts, output)) == 2
    assert output.read_text() == '{"text": "mine"}\n'


def test_every_turn_is_answered_with_the_targets_own_answers_before_it(tmp_path: Path, target: Path) -> None:
    user = [{"role": "user", "content": text} for text in ("what is it", "on the mat")]
    given = {"role": "assistant", "content": "there"}
    asked = [{"role": "user", "content": f"{word} cat {word}"} for word in WORDS]
    rows: list[dict[str, Any]] = [
        {"id": f"talk{number}", "messages": [first, given, user[0], given, user[1]], "topic": "cats"}
        for number, first in enumerate(asked)
    ]
    rows += [
        {"id": 7, "turns": ["the mat", "is it there"]},
        {"id": "tool", "messages": [user[0], given, {"role": "tool", "content": "it is"}]},
    ]
    prompts = write_rows(tmp_path / "p.jsonl", rows)
    output = tmp_path / "a.jsonl"
    argv = command(target, prompts, output, "--max-prompt-tokens", "200", "--max-new-tokens", "40")
    assert main(argv) == 0
    made = read(output)
    ended = {name for name, row in made.items() if row["finish_reason"] == "stop"}
    talks = [f"talk{number}" for number in range(len(asked))]
    assert {*talks, "7", "tool", "tool/2"} <= set(made)
    # a conversation goes on where its answer ended by itself
    for talk in talks:
        assert (f"{talk}/2" in made) == (talk in ended) and (f"{talk}/3" in made) == (f"{talk}/2" in ended)
    assert ("7/2" in made) == ("7" in ended)
    later = [name for name in made if "/" in name and not name.startswith("tool")]
    assert later, "no answer ended: this tests little"
    tokenizer = tiny_tokenizer()
    for name, row in made.items():
        assert row["prompt_ids"] == encode_chat(tokenizer, row["messages"])
        if name.startswith("talk"):
            assert row["topic"] == "cats"
    for name in later:
        base, turn = name.split("/")
        before = made[base if turn == "2" else f"{base}/{int(turn) - 1}"]
        own = {"role": "assistant", "content": before["response"]}
        assert made[name]["messages"][:-1] == [*before["messages"], own]
    # a tool's result follows the call that the row holds
    assert made["tool/2"]["messages"] == rows[-1]["messages"]

    # cut anywhere, it comes out the same
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) * 2 // 3])
    assert main(argv) == 0
    assert output.read_bytes() == whole


def test_rows_keep_their_ids_sampling_and_template(tmp_path: Path, target: Path) -> None:
    rows = [
        {"id": "a", "prompt": "the cat", "temperature": 0.7, "top_p": 0.5, "top_k": 3, "answer": [1, 2], "note": "x"},
        {"id": "a", "prompt": "the mat"},
        {"prompt": "it is", "tools": [{"name": "look"}], "chat_template_kwargs": {"loud": True}},
    ]
    prompts = write_rows(tmp_path / "p.jsonl", rows)
    template = CHATML + "{% if loud %} what{% endif %}{% if tools %} {{ tools[0].name }}{% endif %}"
    tokenizer = tiny_tokenizer(template)
    plan = plan_jobs([prompts], tokenizer, temperatures=[(0.0, 1.0)], template={"loud": False})
    by_text = {job.messages[0]["content"]: job for job in plan.jobs}
    first, second, third = (by_text[row["prompt"]] for row in rows)
    assert first.sampling == (0.7, 3, 0.5) and second.sampling == (0.0, 0, 1.0)
    assert len({first.id, second.id}) == 2 and "a" in {first.id, second.id}
    assert first.fields == {"answer": [1, 2], "note": "x"}
    kept = json.loads(answer_line(Answer(first, "", [3], "stop")))
    assert (kept["note"], kept["answer"], kept["temperature"], kept["top_k"], kept["top_p"]) == (
        "x",
        [1, 2],
        0.7,
        3,
        0.5,
    )
    said = tokenizer.decode(third.prompt_ids)
    assert "what" in said and "look" in said and "what" not in tokenizer.decode(first.prompt_ids)

    with replying(completion) as (url, asked):
        options = ["--endpoint", url, "--endpoint-model", "toy"]
        assert main(command(target, prompts, tmp_path / "a.jsonl", *options)) == 0
    shaped = next(request for request in asked if request["temperature"] > 0)
    assert (shaped["top_p"], shaped["top_k"]) == (0.5, 3)
    assert all((request["top_p"], request["top_k"]) == (1.0, -1) for request in asked if not request["temperature"])


@pytest.mark.parametrize(
    "more, problem",
    [
        ({"temperature": -1}, "`temperature` must be a number, 0 or more"),
        ({"temperature": "hot"}, "`temperature` must be"),
        ({"top_p": 0}, "`top_p` must be"),
        ({"top_k": 2.5}, "`top_k` must be"),
        ({"tools": "{"}, "`tools` is text and no JSON"),
        ({"tools": {}}, "`tools` must be a list"),
        ({"chat_template_kwargs": [1]}, "`chat_template_kwargs` must be an object"),
        ({"chat_template_kwargs": {"conversation": 1, "chat_template": "{{"}}, "the chat template refuses"),
    ],
)
def test_rows_of_no_sense_are_named(more: dict[str, Any], problem: str, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "the cat", **more}])
    with pytest.raises(FsdError, match=f"p.jsonl:1: .*{re.escape(problem)}"):
        plan_jobs([prompts], tiny_tokenizer())


def test_defaults_come_from_the_recipe(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_file(tmp_path, 12)
    recipe = {"model": {"target": str(target)}, "data": {"max_length": 36, "train_files": [str(tmp_path / "a.jsonl")]}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    argv = ["--config", str(tmp_path / "recipe.yaml"), "--prompts", str(prompts), "--device", "cpu", "--quiet"]
    assert main(argv) == 0
    settings = json.loads((tmp_path / "a.meta.json").read_text())
    assert (settings["max_new_tokens"], settings["max_prompt_tokens"]) == (18, 18)
    said = capsys.readouterr()
    left_out = 12 - len(read(tmp_path / "a.jsonl"))
    assert left_out and f"{left_out} of 12 prompts are longer than 18 tokens and are left out" in said.err
    assert f"{left_out} of 12 prompts left out as too long" in said.out
    assert main(["--prompts", str(prompts), "--output", "x.jsonl"]) == 2
    assert "no target: give --target" in capsys.readouterr().err
    (tmp_path / "recipe.yaml").write_text("- 1")
    assert main(argv) == 2 and "no recipe" in capsys.readouterr().err
