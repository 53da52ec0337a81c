"""vLLM's OpenAI server with our processor, in model runner V2 on a CPU, asked by many at once: `make test-vllm`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.peers import vllm_variables
from tests.vllm_distributions import ALLOWED, FUZZY, NEEDS_VLLM, NGRAM, PYTHON, ROOT, Toy, flat_target, greedy_answer
from tests.vllm_v2 import V2

RULES = [
    None, "tilted:0.3:exact_ngram_size=0:min_p=0", "typical:0:0", "tilted:0.2:exact_ngram_size=0:min_p=0:budget=1.5",
]  # fmt: skip
BAD: list[tuple[dict[str, Any], str]] = [
    ({"vllm_xargs": {"rule": "nonsense"}}, "rule: unknown rule 'nonsense'"),
    ({"vllm_xargs": {"rule": "fuzzy:js:0.3"}}, "needs the drafter's distribution"),
    ({"vllm_xargs": {"rule": "tilted"}, "temperature": 0.7, "top_p": 0.9}, "needs top_p = 1"),
    ({"vllm_xargs": {"rule": "tilted", "only_in": "code"}}, "only_in"),
]

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flat_target(tmp_path_factory.mktemp("server") / "target")


@pytest.fixture(scope="module")
def url(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {**os.environ, **vllm_variables(PYTHON, 1), **V2}
    variables["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT}/tests/triton_stub"
    command = [
        str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--served-model-name", "toy",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "16", "--port", str(port),
        "--host", "127.0.0.1", "--speculative-config", json.dumps(NGRAM), "--logits-processors", *FUZZY,
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("log") / "log.txt"
    with open(log, "w") as file:
        server = subprocess.Popen(command, env=variables, stdout=file, stderr=file)
    try:
        found, ends = f"http://127.0.0.1:{port}", time.monotonic() + 900
        while not _answers(f"{found}/health"):
            assert server.poll() is None and time.monotonic() < ends, log.read_text()[-3000:]
            time.sleep(1)
        yield found
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).status_code == 200
    except requests.RequestException:
        return False


def complete(url: str, **more: Any) -> requests.Response:
    """The response to a completion; still open where ``stream`` is asked for."""
    body = {"model": "toy", "temperature": 0, "ignore_eos": True, "allowed_token_ids": ALLOWED, **more}
    return requests.post(f"{url}/v1/completions", json=body, timeout=900, stream=bool(more.get("stream")))


def test_sixty_four_clients_get_what_they_get_alone(target: Path, url: str) -> None:
    """Rules mixed; a quarter streamed, some go away after the first part, some ask for nonsense."""
    toy = Toy(target, ALLOWED)

    def one(n: int) -> Any:
        prompt, length, rule = [5 + (n * k * k + k) % 8 for k in range(4 + n % 9)], 6 + n % 9, RULES[n // 2 % 4]
        asked: dict[str, Any] = {"prompt": prompt, "max_tokens": length, "return_token_ids": True}
        if rule is not None:
            asked["vllm_xargs"] = {"rule": rule}
        if n % 8 == 7:
            body, message = BAD[n // 8 % len(BAD)]
            refused = complete(url, **{**asked, **body})
            return refused.status_code, message in refused.text
        if n % 8 == 5:
            with complete(url, **{**asked, "max_tokens": 100}, stream=True) as answer:
                next(answer.iter_lines())
            return None
        if n % 4 == 0:
            lines = complete(url, **asked, stream=True).text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        else:
            events = [complete(url, **asked).json()]
        choices = [choice for event in events for choice in event["choices"]]
        return prompt, rule, length, [token for choice in choices for token in choice.get("token_ids") or []]

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(one, range(64)))
    for n, answer in enumerate(found):
        if n % 8 == 7:
            assert answer == (400, True)
        elif n % 8 != 5:
            prompt, rule, length, ids = answer
            assert ids == greedy_answer(toy, rule or "exact", prompt, length), (n, rule)
    ends = time.monotonic() + 120
    while not _idle(url):
        assert time.monotonic() < ends, "requests that were aborted hold memory"
        time.sleep(1)


def _idle(url: str) -> bool:
    """Nothing runs, nothing waits, and no block of the key-value cache is held."""
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc{")
    lines = [line for line in requests.get(f"{url}/metrics", timeout=60).text.splitlines() if line.startswith(names)]
    assert len(lines) >= 3
    return not any(float(line.rpartition(" ")[2]) for line in lines)
