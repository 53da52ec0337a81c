"""Methods in processes of their own, any program, `make bench`, and the experiments on drafters of benchmarks/."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

from benchmarks import compare, first_gpu, gpu_round, padded, peers
from benchmarks.peers import HERE
from benchmarks.peers.gguf_files import converted
from fsd_bench import METHODS, parse_methods, process, run
from fsd_bench.cli import build_parser, main
from fsd_bench.planned import count_weights
from fsd_bench.process import ProcessMethod
from fsd_infer import FsdError
from fsd_train.commands.fit import read_recipe
from tests.bench_toys import Toy
from tests.families import tiny_model

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
    assert compare.main(["--peers", "none", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "bench: --peers: unknown 'none'. Known: fake, fake:gguf, fake:broken.\n"
    assert compare.main(["--output", __file__]) == 2, "a file"
    assert f"({__file__}: File exists): give another name" in capsys.readouterr().err
    argv = ["--target", str(toy.target), "--prompts", str(toy.prompts), "--limit", "2", "--every", "1", "--blocks", "1"]
    argv += ["--max-new-tokens", "3", "--methods", "plain", "--peers", "fake,fake:gguf"]
    argv += ["--peer-python", f"fake={sys.executable}", "--output", str(tmp_path / "results"), "--threads", "1"]
    assert compare.main(argv) == 0
    said = capsys.readouterr()
    assert "fake:gguf is left out: it needs a GGUF file of the target (--gguf)." in said.err
    path = tmp_path / "results" / "compare-target.json"
    record = json.loads(path.read_text())
    assert list(record["methods"]) == ["plain", "fake"] and record["settings"]["isolate"] == 1
    facts = record["methods"]["fake"]
    assert facts["version"] == "fake 1.0" and facts["arguments"] == ["target"], "by its name in the workplace"
    assert facts["tokens_per_second"] == 3 and facts["tau"] == 1 and facts["log_likelihood_per_token"] < 0
    assert record["ratios"]["plain"]["fake"]["tokens_per_second"]["pairs"] == 1
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
    with pytest.raises(FsdError, match="method 'x': no/such/program cannot be started"):
        ProcessMethod("x", ["no/such/program"])
    with pytest.raises(FsdError, match="ended with status 3: it wrote nothing"):
        ProcessMethod("x", [sys.executable, "-c", "raise SystemExit(3)"])
    method = ProcessMethod("fake", [sys.executable, fake.script])
    with pytest.raises(FsdError, match="--batch-size 1"):
        method.answer([[1], [2]], {"max_new_tokens": 2}, 0)
    run = method.answer([[7]], {"max_new_tokens": 2, "do_sample": False}, 0)
    assert run.answers[0].tokens == [7, 8] and (run.seconds, run.prefill_seconds) == (1.0, 0.25)
    run = method.answer([[7]], {"max_new_tokens": 2, "schema": {"type": "integer"}}, 0)
    assert run.answers[0].tokens == [40, 41], "a question's schema reaches the engine"
    method.close()


def test_a_program_that_says_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`command:cat` waits for a question, and we for its first line."""
    monkeypatch.setattr(process, "PATIENCE", 0.0)
    late = "import time; time.sleep(1); print('{}', flush=True); input()"
    ProcessMethod("late", [sys.executable, "-c", late]).close()
    assert "method 'late' waits for its process, which says {} on a line" in capsys.readouterr().err


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


def test_the_commands_for_a_gpu_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals run others with toys: here their options are read as the programs read them."""
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    sizes = first_gpu.full(argparse.Namespace(tinyllama="models/tinyllama"), tmp_path)
    parsers = {"fsd_bench.cli": build_parser(), "benchmarks.compare": compare.build_parser()}
    steps = [step for step in first_gpu.steps_of(sizes, tmp_path) if step.words[1] in parsers]
    read = {step.name: parsers[step.words[1]].parse_args(step.words[2:]) for step in steps}
    assert len(read) == 5 and read["built-in-eager"].recording is False and read["tinyllama"].recording is None
    assert all(step.minutes <= 8 for step in first_gpu.steps_of(sizes, tmp_path))
    record: dict[str, Any] = {}
    assert not first_gpu.run_steps(steps, tmp_path, record, record.update, minutes=1.0)
    assert record == {"steps": {}}, "too little time for a step"
    assert Path(read["tinyllama"].drafter) == tmp_path / "tinyllama" / "head"
    recipe = read_recipe(tmp_path / "recipe.yaml")
    assert recipe.model["target"] == read["tinyllama"].target == "models/tinyllama"
    assert recipe.trainer["default_root_dir"] == str(tmp_path / "tinyllama")
    named = {each["class_path"].rpartition(".")[2]: each["init_args"] for each in recipe.trainer["callbacks"]}
    assert named["ExportHead"]["directory"] == read["tinyllama"].drafter, "the head that is decoded is trained"
    assert recipe.data["train_files"] == [str(tmp_path / "answers.jsonl")]
    parts = [part for parts in first_gpu.ROUNDS for part in parts.split(",")]
    assert parts == list(gpu_round.PARTS)


def test_a_padded_model_is_the_same_model() -> None:
    model, ids = tiny_model("llama", attention_bias=True, mlp_bias=True), torch.arange(1, 9)[None]
    right, weights = model(ids).logits, count_weights(model)
    width = padded.pad(model, weights + 3 * 32 * 2 * 500)
    assert width == model.config.intermediate_size == 512 and count_weights(model) > weights + 3 * 32 * 2 * 400
    torch.testing.assert_close(model(ids).logits, right, atol=1e-5, rtol=1e-5)
    again = type(model)(model.config)
    again.load_state_dict(model.state_dict())
    with pytest.raises(FsdError, match="weights already"):
        padded.pad(model, weights)


def test_rounds_are_measured_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done is not run again; a part that failed is."""
    tiny_model("llama").config.save_pretrained(tmp_path)
    file, ran = tmp_path / "rounds.json", list[str]()

    def in_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
        ran.append(name)
        return {"error": "killed"} if name == "plain" and ran.count(name) == 1 else {"rows": {"x": {"ms": 2.0}}}

    monkeypatch.setattr(gpu_round, "_in_process", in_process)
    words = ["--shape", str(tmp_path), "--device", "cpu", "--json", str(file), "--parts"]
    assert gpu_round.main([*words, "limit,plain"]) == 1
    assert gpu_round.main([*words, "plain,rules"]) == 0
    assert ran == ["limit", "plain", "plain", "rules"]
    assert list(json.loads(file.read_text())["parts"]) == ["limit", "plain", "rules"]
    place = gpu_round.Place(str(tmp_path), "cpu", prompt=8, new=6)
    assert gpu_round.limit(place)["forward"]["bytes"] > gpu_round.limit(place)["draft step"]["bytes"]
    assert set(gpu_round.forwards(place)) == {"1 nodes", "6 nodes", "16 nodes", "60 nodes"}
    assert gpu_round.rounds(place)["6,10,60"]["tau"] >= 1


BENCHMARKS = sorted(
    file.stem
    for file in (Path(__file__).resolve().parent.parent / "benchmarks").glob("*.py")
    if re.search(r"ArgumentParser\(|= parser_of\(", text := file.read_text(encoding="utf-8")) and "__main__" in text
)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_lists_its_options(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"benchmarks.{name}").main()
    assert end.value.code == 0 and "usage: " in capsys.readouterr().out


# answers with the prompt's last token, once per new token; writes down when it starts, answers and ends
ENGINE = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
from protocol import serve
log = open(sys.argv[1], "a")
def note(what): print(what, os.getpid(), file=log, flush=True)
def load():
    note("start")
    print("noise of a library", file=sys.stderr)
    def answer(prompts, new, temperature, seed):
        note("answer")
        if len(sys.argv) > 2 and new > 3 and open(sys.argv[1]).read().count("answer") > int(sys.argv[2]):
            sys.exit("RuntimeError: out of luck")
        answers = [{{"tokens": [prompt[-1]] * new, "stopped": False}} for prompt in prompts]
        return {{"seconds": 0.5, "first": 0.1, "answers": answers}}
    return answer, {{"by": "test"}}
serve(load, batches=True)
note("end")
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine.py"
    path.write_text(ENGINE)
    return path


def command(*words: str | Path) -> str:
    return "command:" + shlex.join([sys.executable, *map(str, words)])


def test_one_process_per_method_and_block(toy: Toy, engine: Path, tmp_path: Path) -> None:
    methods = [f"{name}={command(engine, tmp_path / 'log')}" for name in ("a", "b")]
    record = run(toy.prompts, methods, target=str(toy.target), dtype="fp32", max_new_tokens=4, isolate=2, repeat=2)
    events = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    lives = [events[i : i + 7] for i in range(0, len(events), 7)]
    assert len(lives) == 4, "two methods, two blocks"
    for life in lives:  # a warm-up and two prompts twice, and no other process meanwhile
        assert [what for what, _ in life] == ["start", *["answer"] * 5, "end"] and len({pid for _, pid in life}) == 1
    facts = record["methods"]["a"]
    assert facts["by"] == "test" and facts["load_seconds"] > 0 and facts["tau"] is None
    assert facts["tokens_per_second"] == 8 and facts["decode_tokens_per_second"] == pytest.approx(3 / 0.4)
    assert record["ratios"]["a"]["b"]["tokens_per_second"] == {"median": 1, "low": 1, "high": 1, "pairs": 2}


def test_a_dying_process_loses_nothing(
    toy: Toy, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, log = tmp_path / "record.json", tmp_path / "log"
    words = f"bench --prompts {toy.prompts} --target {toy.target} --no-warmup --isolate 2 --max-new-tokens 4 --json"
    argv = [*words.split(), str(path), "--methods", f"a={command(engine, log, '3')}"]
    assert main(argv) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "method 'a': its process ended with status 1: RuntimeError: out of luck" in said
    assert "3 finished runs are kept" in said and "--resume" in said
    log.write_text("")
    partial = path.with_name("record.json.partial.jsonl")
    with partial.open("a") as file:  # as a kill leaves it
        file.write('{"trial": {"method": "a", "gro')
    for more, message in (([], "add --resume to continue it"), (["--resume", "--seed", "9"], "other settings (seed)")):
        assert main([*argv, *more]) == 2 and message in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0 and not partial.exists()
    assert log.read_text().count("answer") == 1, "what was measured is not measured again"
    record = json.loads(path.read_text())
    assert len(record["prompts"]) == 4 and record["methods"]["a"]["seconds_total"] == 4 * 0.5
