"""Regenerating answers: resumable without loss or duplicates, locally and by an endpoint."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from fsd_core.errors import DataError, FsdError
from fsd_core.openai_client import EXTENSIONS, UNSHAPED
from fsd_core.text.encoding import encode_chat, encode_text
from fsd_core.text.row_check import RowCheck
from fsd_infer.targets.target import Target
from fsd_train.cli import main as cli
from fsd_train.commands.regenerate import AnswerFile
from fsd_train.data.backends import EndpointBackend, RegenerationRequest
from fsd_train.data.features import FeatureStore, sequence_key
from fsd_train.data.plan import next_turns, plan_jobs
from fsd_train.data.serving import differences
from tests.families import reference
from tests.openai_server import replying
from tests.text_toys import CHATML, save_tiny_chat_target, tiny_tokenizer, write_rows

WORDS = "the cat sat on the mat what is the answer to that it is there".split()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_target(tmp_path_factory.mktemp("target"))


def prompts_file(path: Path, count: int) -> Path:
    texts = [" ".join(WORDS[i % 5 : i % 5 + 1 + i % 7]) + f" {i}" for i in range(count)]
    return write_rows(path, [{"prompt": text} for text in texts])


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


@pytest.mark.parametrize("ends", [[7, 0], None])
def test_answers_are_the_targets_own(tmp_path: Path, target: Path, ends: list[int] | None) -> None:
    """Batching and padding change nothing. The generation config's end tokens count, not the tokenizer's."""
    other = shutil.copytree(target, tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    model.generation_config.eos_token_id = ends
    model.generation_config.save_pretrained(other)
    out = tmp_path / "out"
    assert main(command(other, prompts_file(tmp_path / "p.jsonl", 9), out, "--drafter", "lookup")) == 0
    rows, tokenizer = read(out / "answers.jsonl"), tiny_tokenizer()
    assert len(rows) == 9
    for row in rows.values():
        assert row["prompt_ids"] == encode_chat(tokenizer, row["messages"])
        (alone,) = reference(model, [row["prompt_ids"]], max_new_tokens=12)
        assert row["response_ids"] == alone
        assert row["response"] == tokenizer.decode(alone, skip_special_tokens=True)
        assert row["finish_reason"] == ("stop" if alone[-1] in (ends or ()) else "length")
    assert (row["temperature"], row["source"], row["ids_from"]) == (0.0, "p", "target")
    settings = json.loads((out / "answers.meta.json").read_text())
    assert (settings["rule"], settings["drafter"]) == ("exact", "lookup")


def test_rows_record_their_template_arguments_and_training_says_what_serving_must_do(
    tmp_path: Path, target: Path
) -> None:
    prompts, out = prompts_file(tmp_path / "prompts.jsonl", 3), tmp_path / "answers.jsonl"
    made = ["--target", str(target), "--prompts", str(prompts), "--output", str(out), "--max-new-tokens", "4"]
    assert main([*made, "--chat-template-args", '{"enable_thinking": false}']) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(row["chat_template_kwargs"] == {"enable_thinking": False} for row in rows)
    tokenizer = tiny_tokenizer()
    (said,) = differences(rows, tokenizer)
    assert said.startswith('3 rows were made with the template arguments {"enable_thinking": false}: serve with')
    for row in rows:
        del row["chat_template_kwargs"]
    assert differences(rows, tokenizer) == []
    raw = {"messages": [{"role": "user", "content": "the cat"}], "prompt_ids": encode_text(tokenizer, "the cat")}
    assert differences([raw, {"messages": [{"role": "user", "content": "x"}], "response": "y"}], tokenizer) == []
    system = [{"role": "system", "content": "the mat"}, *rows[0]["messages"]]
    rows[0]["prompt_ids"] = encode_chat(tokenizer, system)  # a server whose template adds one
    (said,) = differences(rows, tokenizer)
    assert said.startswith("1 of 3 prompts are not what this target's chat template makes") and "the mat" in said
    for broken in ({"messages": {"role": "user"}}, {"messages": ["x"]}, {"prompt_ids": "1 2"}, {"tools": "{"}):
        assert differences([{**rows[0], **broken}, *rows[1:]], tokenizer) == []  # such a row is no reason to stop


def test_raw_text_is_continued_and_features_are_stored_on_the_way(tmp_path: Path, target: Path) -> None:
    prompts, output = prompts_file(tmp_path / "prompts.jsonl", 6), tmp_path / "answers.jsonl"
    made, again = tmp_path / "features", tmp_path / "again"
    assert main(command(target, prompts, output, "--raw", "--features", str(made))) == 0
    tokenizer = tiny_tokenizer()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt_ids"] for row in rows] == [tokenizer(row["messages"][0]["content"]).input_ids for row in rows]
    with torch.inference_mode():
        wanted = Target.from_pretrained(str(target), dtype=torch.float32)
        store = FeatureStore(made)
        for row in rows:  # but for the last token's, which the target never read
            ids = [*row["prompt_ids"], *row["response_ids"]]
            found, expected = store.get(sequence_key(ids)).float(), wanted.features(torch.tensor([ids]))[0]
            assert found.shape == expected.shape
            torch.testing.assert_close(found[:-1], expected[:-1], rtol=1e-2, atol=1e-2)
    # a killed run's texts are added by the other command, which finds what is there
    assert cli(["cache-features", "--target", str(target), "--data", str(output), "--output", str(again)]) == 0
    keys = {sequence_key(row["prompt_ids"] + row["response_ids"]) for row in rows}
    assert len(FeatureStore(again)) == len(store) == len(keys)
    turns = [{"role": "system", "content": "a"}, *rows[0]["messages"]]
    chat = write_rows(tmp_path / "chat.jsonl", [{"messages": turns}])
    assert main(command(target, chat, tmp_path / "chat-answers.jsonl", "--raw")) == 2


def test_resumes_exactly_from_any_cut(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, whole, append = prompts_file(tmp_path / "p.jsonl", 9), tmp_path / "whole.jsonl", AnswerFile.append

    def written(self: AnswerFile, file: IO[bytes], lines: Sequence[bytes]) -> None:
        append(self, file, lines)
        assert self.path.read_bytes().endswith(b"".join(lines)), "a killed run would lose this batch"

    monkeypatch.setattr(AnswerFile, "append", written)
    # recycling drafts by what earlier requests saw, which a resumed run has not seen
    options = ["--temperature", "0.9", "--drafter", "recycle"]
    assert main(command(target, prompts, whole, *options)) == 0
    expected, raw = read(whole), whole.read_bytes()
    for cut in (len(raw) // 3, len(raw) - 1, len(raw)):
        part = tmp_path / f"cut{cut}.jsonl"
        part.write_bytes(raw[:cut])  # what a killed run leaves: whole lines and at most one torn one
        part.with_suffix(".meta.json").write_text(whole.with_suffix(".meta.json").read_text())
        assert main(command(target, prompts, part, *options)) == 0
        assert read(part) == expected


def test_other_files_are_left_alone(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = prompts_file(tmp_path / "a" / "p.jsonl", 3), prompts_file(tmp_path / "b" / "p.jsonl", 2)
    output = tmp_path / "a.jsonl"
    argv = command(target, first, output, "--prompts", str(first), str(second))
    assert main(argv) == 0 and main(argv) == 0
    before = output.read_bytes()
    capsys.readouterr()

    def refused(words: str, *more: str) -> None:
        assert main([*argv, *more]) == 2
        assert words in capsys.readouterr().err
        assert output.read_bytes() == before

    refused("seed was 0, now 5", "--seed", "5")
    more = int(argv[argv.index("--max-new-tokens") + 1]) + 1
    refused(f"other settings: max_new_tokens was {more - 1}, now {more}. Give", "--max-new-tokens", str(more))
    prompts_file(first, 4)  # the first of two files with one name
    refused("prompts was")
    with open(output, "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused("another run is writing")
    prompts_file(first, 3)
    before = b'{"text": "mine"}\n'
    output.write_bytes(before)
    refused("this is not a file of answers")
    output.with_suffix(".meta.json").unlink()
    refused("no a.meta.json")


REFUSED = [
    ("--prompts bad.jsonl", "bad.jsonl:2: not JSON"),
    ("--prompts empty.jsonl", "empty.jsonl: there is no prompt to answer"),
    ("--max-new-tokens 250 --max-prompt-tokens 100", "exceed the target's context of 256"),
    ("--target=", "no target was given. Give --target"),
    ("--config bad.yaml", "bad.yaml is not a recipe: "),
    ("--target bare", "bare has no tokenizer"),
    ("--max-length 12", "all 2 prompts are longer than 1 tokens. Raise --max-prompt-tokens, or lower --max-new-tokens"),
    ("--output a.json", "a.json: answers are written as JSON lines. Give a .jsonl file, or a directory."),
    ("--prompts -", "--prompts -: a run that goes on reads its prompts again. Give a file."),
]


@pytest.mark.parametrize(("options", "problem"), REFUSED)
def test_bad_input_is_named_before_anything_is_written(
    options: str, problem: str, here: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = prompts_file(here / "p.jsonl", 2)
    Path("bad.jsonl").write_text('{"prompt": "the cat"}\n{\n')
    Path("bad.yaml").write_text("- 1")
    Path("empty.jsonl").touch()
    shutil.copytree(target, "bare", ignore=shutil.ignore_patterns("*token*"))
    assert main(command(target, prompts, here / "a.jsonl", *options.split())) == 2
    assert problem in capsys.readouterr().err
    assert not Path("a.jsonl").exists()


def test_every_turn_is_answered_with_the_targets_own_answers_before_it(tmp_path: Path, target: Path) -> None:
    def turn(content: str, role: str = "user") -> dict[str, str]:
        return {"role": role, "content": content}

    given, tool = turn("there", "assistant"), turn("it is", "tool")
    talks = {word: [turn(f"{word} cat"), given, turn("what is it"), given, turn("on the mat")] for word in WORDS}
    rows: list[dict[str, Any]] = [{"id": word, "messages": messages} for word, messages in talks.items()]
    rows.append({"id": "tool", "messages": [turn("what is it"), given, tool], "topic": "cats"})
    output = tmp_path / "a.jsonl"
    prompts = write_rows(tmp_path / "p.jsonl", rows)
    argv = command(target, prompts, output, "--max-prompt-tokens", "200", "--max-new-tokens", "40")
    assert main(argv) == 0
    made = read(output)
    assert any(f"{word}/2" in made for word in talks), "no answer ended: this tests little"
    for word in talks:
        for before, after in ((word, f"{word}/2"), (f"{word}/2", f"{word}/3")):
            # a conversation goes on where its answer ended by itself
            assert (after in made) == (before in made and made[before]["finish_reason"] == "stop")
            if after in made:
                own = turn(made[before]["response"], "assistant")
                assert made[after]["messages"][:-1] == [*made[before]["messages"], own]
    for row in made.values():
        assert row["prompt_ids"] == encode_chat(tiny_tokenizer(), row["messages"])
    # a tool's result follows the call that the row holds
    assert (made["tool/2"]["messages"], made["tool/2"]["topic"]) == (rows[-1]["messages"], "cats")

    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) * 2 // 3])
    assert main(argv) == 0
    assert output.read_bytes() == whole


def test_a_later_turn_that_the_template_refuses_ends_its_conversation_alone(tmp_path: Path, capsys: Any) -> None:
    asked, given = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "there"}
    rows = [{"id": word, "messages": [asked, given, {**asked, "content": word}]} for word in WORDS]
    refusing = "{% if messages[-1]['content'] == 'mat' %}{{ raise_exception('no mat') }}{% endif %}"
    tokenizer, file = tiny_tokenizer(refusing + CHATML), write_rows(tmp_path / "p.jsonl", rows)
    plan = plan_jobs([file], tokenizer, check=(check := RowCheck()))
    check.read = 40  # among many rows
    later = next_turns(plan, dict.fromkeys(plan.ids, ("it is", "stop")), tokenizer, check=check)
    check.finish()
    assert plan.ids - {job.first_id for job in later.jobs} == {"mat"} and len(later.jobs) == len(plan.jobs) - 1
    assert "1 x mat/2: the chat template refuses" in capsys.readouterr().err
    with pytest.raises(DataError, match="a conversation, but this tokenizer has no chat template"):
        plan_jobs([file], tiny_tokenizer(None))


# by an endpoint


def completion(body: dict[str, Any], number: int = 0, **more: Any) -> tuple[int, Any]:
    ids = [5 + body["prompt"][-7] % 50, 60, 0]
    choice = {"text": "it is", "finish_reason": "stop", "token_ids": ids, "prompt_token_ids": body["prompt"], **more}
    return 200, {"choices": [choice]}


def job(index: int = 0) -> RegenerationRequest:
    messages: Any = [{"role": "user", "content": f"the cat {index}"}]
    return RegenerationRequest(f"id{index}", messages, encode_chat(tiny_tokenizer(), messages), 0.0, "p")


def backend(
    url: str | list[str], template: str = CHATML, config: GenerationConfig | None = None, **options: Any
) -> EndpointBackend:
    chosen = {"seed": 1, "pause": 0.001, "concurrency": 4, **options}
    return EndpointBackend(url, "toy", tiny_tokenizer(template), config, 12, **chosen)


def test_endpoints_share_requests_of_ids(tmp_path: Path, target: Path) -> None:
    prompts, output = prompts_file(tmp_path / "p.jsonl", 19), tmp_path / "a.jsonl"
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "the end", "temperature": 0.7, "top_k": 3, "top_p": 0.5}) + "\n")
    meeting = threading.Barrier(2)  # of the servers' first requests: two are in flight at once

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if number == 1:
            meeting.wait(30)
        return completion(body)

    with replying(reply) as (url, asked), replying(reply) as (other, asked_too):
        options = ["--endpoint", url, other + "/v1", "--endpoint-model", "toy", "--temperature", "0", "0.8"]
        for _ in range(2):  # nothing is asked twice
            assert main(command(target, prompts, output, *options)) == 0
            assert len(asked) + len(asked_too) == 20
    assert {0.0, 0.7, 0.8} == {request["temperature"] for request in asked + asked_too}
    requests = {tuple(request["prompt"]): request for request in asked + asked_too}
    for row in read(output).values():
        request = requests[tuple(row["prompt_ids"])]
        sampling = {name: row[name] for name in ("temperature", "top_k", "top_p") if name in row}
        sent = {"path": "/v1/completions", "model": "toy", "max_tokens": 12, **sampling}
        assert {**request, **UNSHAPED, **EXTENSIONS, **sent} == request
        assert ("seed" in request) == (row["temperature"] > 0)
        assert row["response_ids"] == [5 + row["prompt_ids"][-7] % 50, 60, 0] and row["ids_from"] == "target"


ENDINGS = [
    ({"token_ids": [50, 51, 2]}, [50, 51, 2]),  # the template's end of turn
    ({"token_ids": [50, 51, 60]}, [50, 51, 60]),  # one of the generation config's
    ({"token_ids": [50, 51, 0]}, [50, 51, 0]),  # the tokenizer's eos
    ({"token_ids": [50, 51, 61], "stop_reason": 61}, [50, 51, 61]),  # one that the server alone knows
    ({"token_ids": [50, 51], "matched_stop": 60}, [50, 51, 60]),
    ({"token_ids": [50, 51], "stop_reason": "text"}, [50, 51, 2]),
    ({"token_ids": []}, [2]),
    ({"token_ids": [50, 51], "stop_reason": 60, "finish_reason": "length"}, [50, 51]),
    ({"token_ids": None}, [*tiny_tokenizer()("it is")["input_ids"], 2]),
]
BOTH_ENDINGS = [
    ({"token_ids": [50, 51]}, [50, 51, 2, 0]),
    ({"token_ids": [50, 51, 2]}, [50, 51, 2, 0]),  # the server omits what its eos is
    ({"token_ids": [50, 51, 2, 0]}, [50, 51, 2, 0]),
    ({"token_ids": [50, 51], "stop_reason": 2}, [50, 51, 2]),  # where the server was told to end
    ({"token_ids": [50, 51, 2], "matched_stop": 0}, [50, 51, 2, 0]),
    ({"token_ids": []}, [2, 0]),
    ({"token_ids": None}, [*tiny_tokenizer()("it is")["input_ids"], 2, 0]),
]
# as under Gemma's, a turn ends by another token (2) than the tokenizer's eos (0); as Command-R's turns do, by both
TURNS = [("<|pad|>", [0, 60], *case) for case in ENDINGS] + [("<|pad|><|end|>", 0, *case) for case in BOTH_ENDINGS]


@pytest.mark.parametrize(("end", "eos", "reply", "expected"), TURNS)
def test_endpoint_answers_end_with_the_tokens_of_a_turns_end(end: str, eos: Any, reply: Any, expected: Any) -> None:
    template = CHATML.replace("<|end|>", end)
    with replying(lambda body, n: completion(body, **reply)) as (url, _):
        asking = backend(url, template, GenerationConfig(eos_token_id=eos))
        answer = asking.ask(job(), asking.servers[0])
        assert answer.response_ids == expected
        assert answer.ids_from == ("target" if reply["token_ids"] is not None else "text")
        if eos == 0:
            stopping = backend(url, template, GenerationConfig(eos_token_id=[0, 2]))  # the first one ends answers
            assert stopping.end_of_turn == [2]


FAILURES = [
    ((404, {"error": "no such model"}), 1, "no such model"),
    ((500, {"error": "out of memory"}), 3, "status 500: .*out of memory.* after 3 tries. Finished"),
    ((200, {"result": 1}), 1, "sent no completion"),
    ((200, {"choices": [{"text": None, "finish_reason": "stop"}]}), 1, "sent no completion"),
    (completion({"prompt": [5] * 9}, token_ids=[10**12]), 1, "sent no completion"),
    (completion({"prompt": [5] * 9}, token_ids=[], finish_reason="length"), 1, "sent no completion"),
    (completion({"prompt": [5] * 9}, finish_reason="abort"), 1, "sent no completion"),
    (completion({"prompt": [5] * 9}, text="\ud800", token_ids=None), 1, "sent no completion"),
    ((200, "[" * 99999), 3, "answered no JSON"),
    ((200, "9" * 6000), 3, "answered no JSON"),
    (completion({"prompt": [5] * 9}, prompt_token_ids=[1]), 1, "changed the prompt's token ids"),
]


@pytest.mark.parametrize(("failure", "tries", "problem"), FAILURES)
def test_endpoint_keeps_answers_that_come_with_a_failure(
    failure: tuple[int, Any], tries: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, got, ask, others = job(0).prompt_ids, list[str](), EndpointBackend.ask, threading.Semaphore(0)

    def after_the_others(backend: EndpointBackend, one: RegenerationRequest, server: Any) -> Any:
        for _ in range(5 if one.id == "id0" else 0):
            others.acquire(timeout=30)
        try:
            return ask(backend, one, server)
        finally:
            others.release()

    monkeypatch.setattr(EndpointBackend, "ask", after_the_others)
    with replying(lambda body, n: failure if body["prompt"] == first else completion(body)) as (url, asked):
        with pytest.raises(FsdError, match=problem):
            for group in backend(url, concurrency=3, attempts=3).answer([[job(i) for i in range(6)]], set()):
                got += [answer.job.id for answer in group]
    assert got == ["id1", "id2", "id3", "id4", "id5"]
    assert [request["prompt"] for request in asked].count(first) == tries
