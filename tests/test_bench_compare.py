"""`make bench`: other engines in their own environments; what cannot run is reported and left out."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

from benchmarks import compare, memory_in_vllm, peers, serving
from benchmarks.peers.gguf_files import converted
from benchmarks.workplace import Workplace
from fsd_bench import parse_methods
from fsd_bench.methods import METHODS
from fsd_bench.process import ProcessMethod
from fsd_infer import FsdError
from fsd_infer.targets.loading import load_tokenizer
from tests.bench_toys import Toy

# a peer's script: counts up from the prompt's last token
SCRIPT = """
import sys
from protocol import serve

def load():
    if "--broken" in sys.argv:
        raise RuntimeError("no such instruction set\\nand more")
    print("noise on standard output")
    def answer(prompt, new, temperature, seed, schema=None):
        prompt = [40] if schema else prompt
        common = {"seconds": 1.0, "first": 0.25, "stopped": False}
        return {**common, "tokens": [prompt[-1] + i for i in range(new)], "verified": new - 1, "forwards": 2}
    return answer, {"by": "fake", "version": "fake 1.0", "arguments": sys.argv[1:]}

serve(load)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[peers.Peer]:
    """A peer "fake" with the modes fake, fake:gguf and fake:broken, which needs no installation."""
    script = tmp_path / "run_fake.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(peers.HERE)!r})\n{SCRIPT}")
    modes = {"": ["{directory}"], "gguf": ["{gguf}", "{THREADS}"], "broken": ["{directory}", "--broken"]}
    peer = peers.Peer(modes, ["fake==1.0"], str(script), "import sys")
    monkeypatch.setitem(peers.PEERS, "fake", peer)
    monkeypatch.setattr(compare, "PEER_METHODS", ["fake", "fake:gguf", "fake:broken"])
    yield peer
    METHODS._entries.pop("fake", None)


def test_a_peer_is_measured_like_the_others(
    toy: Toy, fake: peers.Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    argv = ["--target", str(toy.target), "--prompts", str(toy.prompts), "--limit", "2", "--every", "1", "--blocks", "2"]
    argv += ["--max-new-tokens", "3", "--methods", "plain", "--peers", "fake,fake:gguf"]
    argv += ["--peer-python", f"fake={sys.executable}", "--output", str(tmp_path / "results"), "--threads", "1"]
    assert compare.main(argv) == 0
    said = capsys.readouterr()
    assert "fake:gguf is left out: it needs a GGUF file of the target (--gguf)." in said.err
    path = tmp_path / "results" / "compare-target.json"
    record = json.loads(path.read_text())
    assert list(record["methods"]) == ["plain", "fake"] and record["settings"]["isolate"] == 2
    facts = record["methods"]["fake"]
    assert facts["version"] == "fake 1.0" and facts["arguments"] == ["target"], "by its name in the workplace"
    assert facts["tokens_per_second"] == 3 and facts["tau"] == 1 and facts["log_likelihood_per_token"] < 0
    assert record["ratios"]["plain"]["fake"]["tokens_per_second"]["pairs"] == 2
    assert str(tmp_path) not in path.read_text(), "nothing of the machine"
    assert record["environment"]["command"].startswith("python -m benchmarks.compare --target target")
    assert said.out.startswith("speed\n") and "\nfake " in said.out


def test_a_peer_that_cannot_do_what_is_asked_says_why(fake: peers.Peer, tmp_path: Path) -> None:
    files = {"directory": "model"}
    assert peers.prepare(["fake:broken"], tmp_path, {"fake": Path(sys.executable)}, files, 1) == ["fake:broken"]
    spec = parse_methods(["broken=fake:broken"])[0]
    with pytest.raises(FsdError, match="method 'broken': RuntimeError: no such instruction set$"):
        METHODS.get("fake").make(spec, None)  # type: ignore[arg-type]
    with pytest.raises(FsdError, match="fake is one of fake, fake:gguf, fake:broken"):
        parse_methods(["fake:q4"])
    method = ProcessMethod("fake", [sys.executable, fake.script])
    with pytest.raises(FsdError, match="--batch-size 1"):
        method.answer([[1], [2]], {"max_new_tokens": 2}, 0)
    run = method.answer([[7]], {"max_new_tokens": 2, "do_sample": False}, 0)
    assert run.answers[0].tokens == [7, 8] and (run.seconds, run.prefill_seconds) == (1.0, 0.25)
    run = method.answer([[7]], {"max_new_tokens": 2, "schema": {"type": "integer"}}, 0)
    assert run.answers[0].tokens == [40, 41], "a question's schema reaches the engine"
    method.close()


def test_vllm_answers_tasks_with_a_schema_and_the_workloads_of_memory(
    toy: Toy, fake: peers.Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: dict[str, list[str]] = {"": ["{directory}"], "ngram": ["{directory}"]}
    monkeypatch.setitem(peers.PEERS, "vllm", peers.Peer(modes, [], fake.script, ""))
    args = argparse.Namespace(target=str(toy.target), vllm=Path(sys.executable), repeats=1, max_new_tokens=3)
    decoder: Any = SimpleNamespace(encode=lambda messages: [7])
    try:
        found = serving.in_vllm(decoder, args)
    finally:
        METHODS._entries.pop("vllm", None)
    assert list(found) == [f"{method}, {asked}" for method in ("vllm", "vllm:ngram") for asked in ("schema", "free")]
    assert all(each["tokens_per_second"] == 3 and each["tokens_per_forward"] == 1 for each in found.values())
    method, rows = ProcessMethod("fake", [sys.executable, fake.script]), [{"workload": "chat", "turns": ["a", "and?"]}]
    answers = list(memory_in_vllm.answers_of(method, load_tokenizer(toy.target), rows, 2))
    method.close()
    assert [(answer["tokens"], answer["forwards"]) for answer in answers] == [(2, 2)] * 2, "an answer to each turn"


def test_peer_that_cannot_be_installed_is_left_out(
    fake: peers.Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        said = "WARNING: slow\nERROR: No matching distribution found\n"
        return subprocess.CompletedProcess(command, int("install" in command), "", said)

    monkeypatch.setattr(peers.subprocess, "run", pip)
    assert peers.prepare(["fake"], tmp_path, {}, {"directory": "model"}, 1) == []
    expected = f"fake is left out: fake==1.0 cannot be installed into {tmp_path / '.venv-fake'}: ERROR: No matching"
    assert expected in capsys.readouterr().err


def test_gguf_files_hold_the_numbers_that_the_packed_ones_stand_for(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    packed = quants.quantize(numbers, GGMLQuantizationType.Q4_1)
    writer = GGUFWriter(tmp_path / "q4.gguf", "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.0.attn_norm.weight", numbers[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = GGUFReader(converted(tmp_path / "q4.gguf", "f16", tmp_path / "f16.gguf"))
    assert made.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    matrix, norm = made.tensors
    expected = quants.dequantize(packed, GGMLQuantizationType.Q4_1)
    assert matrix.tensor_type == GGMLQuantizationType.F16
    assert np.array_equal(matrix.data, expected.astype(np.float16)) and np.array_equal(norm.data, numbers[0])
    before = (tmp_path / "f16.gguf").stat().st_mtime_ns
    assert converted(tmp_path / "none", "f16", tmp_path / "f16.gguf").stat().st_mtime_ns == before, "made once"


def test_models_are_named_by_their_last_part(tmp_path: Path) -> None:
    for name in ("models/small", "other/small"):
        (tmp_path / name).mkdir(parents=True)
    work = Workplace(tmp_path / "work")
    assert [work.link(tmp_path / "models" / "small"), work.link("built-in")] == ["small", "built-in"]
    with pytest.raises(FsdError, match="the same name"):
        work.link(tmp_path / "other" / "small")
    assert Workplace(tmp_path / "work").link(tmp_path / "other" / "small") == "small", "earlier links are gone"


def test_an_unknown_peer_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    assert compare.main(["--peers", "none", "--output", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("bench: --peers: unknown 'none'. Known: vllm, vllm:ngram") and err.count("\n") == 1
