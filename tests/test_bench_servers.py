"""The benchmark of servers with the OpenAI completions API: they get the same tokens, and odd answers end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsd_bench import ServerError
from fsd_bench.cli import main
from fsd_bench.server import Server, ServerMethod
from fsd_infer import FsdError
from tests.bench_toys import Toy
from tests.openai_server import Behaviour, made_up, serving
from tests.test_bench import NEW, toy_run


@pytest.fixture(scope="module")
def greedy(toy: Toy) -> Behaviour:
    """A server that decodes the toy target greedily, two tokens per event."""
    model = AutoModelForCausalLM.from_pretrained(toy.target, dtype=torch.float32)

    def answer(prompt: list[int], limit: int) -> list[int]:
        found: list[int] = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=limit)[0].tolist()
        return found[len(prompt) :]

    return Behaviour(answer, burst=2)


def test_server_gets_the_same_tokens_and_is_measured_alike(
    toy: Toy, greedy: Behaviour, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have another tokenizer, which its protocol does not tell: another name is said aloud."""
    with serving(greedy) as url:
        methods = ["plain", f"theirs=server:{url}#toy"]
        record = toy_run(toy, methods, repeat=2, warmup=True, log_likelihood=True, baselines=["theirs"])
    assert f"serves 'toy' and gets token ids of '{toy.target}'" in capsys.readouterr().err
    plain, theirs = record["methods"]["plain"], record["methods"]["theirs"]
    assert plain["identical_to_baseline"] == 1.0 and record["baseline"] == "theirs"
    for key in ("answer_tokens", "finished_fraction"):
        assert theirs[key] == plain[key]
    assert theirs["log_likelihood_per_token"] == pytest.approx(plain["log_likelihood_per_token"], abs=1e-4)
    assert 0 < theirs["prefill_seconds"] < theirs["seconds_per_answer"]
    assert theirs["tau"] is None and theirs["target_forwards"] is None and theirs["phases"] == {}
    assert theirs["url"] == url and theirs["model"] == "toy"
    assert record["ratios"]["theirs"]["plain"]["tokens_per_second"]["pairs"] == 4
    assert len(greedy.requests) == 1 + 4 * 2  # warm-up, then every prompt twice
    assert all(body["temperature"] == 0 and body["max_tokens"] == NEW for body in greedy.requests[1:])
    # nothing of the model's generation config may shape what is compared with the target's own greedy answers
    neutral = dict(top_p=1, presence_penalty=0, frequency_penalty=0, top_k=-1, min_p=0, repetition_penalty=1)
    assert all({**body, **neutral} == body for body in greedy.requests)


def test_server_takes_batches_and_sampling(toy: Toy) -> None:
    behaviour = Behaviour(made_up)
    with serving(behaviour) as url:
        record = toy_run(toy, [f"s=server:{url}"], batch_size=2, temperature=0.7, seed=3)
    rows = record["prompts"]
    assert len({row["methods"]["s"][0]["tokens_sha256"] for row in rows}) == len(rows)
    assert all(len(body["prompt"]) == 2 and body["temperature"] == 0.7 for body in behaviour.requests)
    assert behaviour.requests[0]["seed"] == 3


@pytest.mark.parametrize("odd", [
    {"choices": [{"index": 3, "text": "x"}]}, {"choices": [{"index": -1, "text": "x"}]}, {"choices": ["x"]},
    {"choices": [{"text": "x", "token_ids": ["x"]}]}, {"choices": 3}, {"choices": [{"text": 3}]}, {"usage": "many"},
])  # fmt: skip
def test_events_of_another_form_are_named(odd: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Behaviour(made_up)) as url:
        method = ServerMethod("s", Server(url))
        monkeypatch.setattr(method.server, "stream", lambda *arguments: iter([odd]))
        with pytest.raises(ServerError, match="sent no event of the OpenAI API"):
            method.answer([[1, 2]], {"max_new_tokens": 4, "do_sample": False}, 0)


def test_tokens_of_another_vocabulary_end_the_run(toy: Toy, tmp_path: Path) -> None:
    """They would fail when answers are scored, after everything is measured."""
    with serving(Behaviour(lambda prompt, limit: [10**6] * limit)) as url:
        with pytest.raises(
            FsdError, match=r"method 's' answered token 1000000, but .* has ids from 0 to \d+: it decodes"
        ):
            toy_run(toy, ["plain", f"s=server:{url}"], json_path=tmp_path / "r.json", log_likelihood=True)


def test_an_aborted_answer_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is stopped cuts answers short, which would count as answers of full length."""
    cut = {"choices": [{"text": "x", "token_ids": [1], "finish_reason": "abort"}], "usage": {"completion_tokens": 1}}
    with serving(Behaviour(made_up)) as url:
        method = ServerMethod("s", Server(url))
        monkeypatch.setattr(method.server, "stream", lambda *arguments: iter([cut]))
        with pytest.raises(ServerError, match="aborted an answer: is it stopping"):
            method.answer([[1, 2]], {"max_new_tokens": 4, "do_sample": False}, 0)


def test_an_absent_server_is_named_and_leaves_nothing(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Behaviour(made_up)) as url:
        with pytest.raises(ServerError, match="does not serve 'x'. It serves: toy"):
            toy_run(toy, [f"server:{url}#x"])
        with pytest.raises(ServerError, match="refused /v1/completions with status 404: .*no such model"):
            list(Server(url).stream({"model": "other", "prompt": [1], "max_tokens": 1}))
    path = tmp_path / "r.json"
    argv = ["bench", "--prompts", str(toy.prompts), "--json", str(path), "--target", str(toy.target)]
    assert main([*argv, "--methods", f"plain,server:{url}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fsd-bench: server {url} cannot be reached") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing to clear away"
