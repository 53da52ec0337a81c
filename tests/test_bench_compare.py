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
import yaml
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from scipy.stats import spearmanr

from benchmarks import compare, first_gpu, gpu_round, ladder, padded, peers, stories
from benchmarks.beginnings import WORDS, beginnings
from benchmarks.peers import HERE
from benchmarks.peers.gguf_files import converted
from fsd_bench import METHODS, parse_methods, run
from fsd_bench.cli import build_parser, main
from fsd_bench.planned import count_weights
from fsd_bench.process import ProcessMethod
from fsd_infer import FsdError
from fsd_train.commands.fit import read_recipe
from tests.bench_toys import Toy
from tests.families import tiny_model
from tests.loss_toys import check, distributions, make_batch

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
    method = ProcessMethod("fake", [sys.executable, fake.script])
    with pytest.raises(FsdError, match="--batch-size 1"):
        method.answer([[1], [2]], {"max_new_tokens": 2}, 0)
    run = method.answer([[7]], {"max_new_tokens": 2, "do_sample": False}, 0)
    assert run.answers[0].tokens == [7, 8] and (run.seconds, run.prefill_seconds) == (1.0, 0.25)
    run = method.answer([[7]], {"max_new_tokens": 2, "schema": {"type": "integer"}}, 0)
    assert run.answers[0].tokens == [40, 41], "a question's schema reaches the engine"
    method.close()


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
    assert len(read) == 5 and read["built-in-eager"].capture is False and read["tinyllama"].capture is None
    assert all(step.minutes <= 8 for step in first_gpu.steps_of(sizes, tmp_path))
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
        file.write('{"job": {"method": "a", "gro')
    for more, message in (([], "add --resume to continue it"), (["--resume", "--seed", "9"], "other settings (seed)")):
        assert main([*argv, *more]) == 2 and message in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0 and not partial.exists()
    assert log.read_text().count("answer") == 1, "what was measured is not measured again"
    record = json.loads(path.read_text())
    assert len(record["prompts"]) == 4 and record["methods"]["a"]["seconds_total"] == 4 * 0.5


def test_beginnings_to_judge_by_share_nothing_with_those_to_train_on() -> None:
    train, judge = ([text for texts in WORDS[kind].values() for text in texts] for kind in ("train", "judge"))
    assert not set(train) & set(judge)
    made = beginnings("train", 400)
    assert len(set(made)) == 400 and made[:50] == beginnings("train", 50) != beginnings("train", 50, seed=1)


def test_the_value_of_a_chain_is_what_tilted_gives_for_it() -> None:
    batch = make_batch()
    p, q = distributions(batch)
    gap = p.log().amax(-1, keepdim=True) - p.log()
    kept = (q * (1 - 0.3 * gap).clamp_min(0)).sum(-1)  # [S, N]
    # chains that begin at rows 0..4 of the first text, and in the second at those that miss the hole at (1, 11)
    starts = torch.tensor([0, 1, 2, 3, 4, 7, 8, 9, 11])
    steps = torch.arange(3)[:, None]
    lengths = kept[steps, starts + steps].cumprod(0).sum(0)
    anchor = ((p * (p.log() - q.log())).sum(-1) * batch.weights).sum() / batch.weights.sum()
    expected = 0.1 * anchor - (lengths / 3).log().mean()
    check(batch, stories.ValueLoss(kl_coef=0.3)(batch.batch()).loss, expected)


def test_every_loss_has_its_recipe(tmp_path: Path) -> None:
    args = argparse.Namespace(work=tmp_path, target="models/target", drafter="models/drafter", steps=7)
    for loss, asked in stories.LOSSES.items():
        file = stories.write_recipe(args, loss, 3, tmp_path / loss)
        recipe = read_recipe(file)
        written = yaml.safe_load(file.read_text())
        arguments = written["model"]["init_args"]
        assert {name: arguments[name] for name in asked} == asked and arguments["drafter"] == "models/drafter"
        assert written["seed_everything"] == 3 and recipe.model["drafter"] == "models/drafter"
        assert recipe.trainer["max_steps"] == 7 and recipe.trainer["default_root_dir"] == str(tmp_path / loss)
        assert recipe.data["train_files"] == [str(tmp_path / "answers.jsonl")]


def test_losses_are_compared_over_seeds_on_the_best_chain() -> None:
    args = argparse.Namespace(seeds=[0, 1], losses=["lk", "js"], chains=[8, 4], rules=["exact"])
    tau = {"public": (2.0, 1.6), "lk-0": (3.0, 2.9), "lk-1": (3.0, 2.7), "js-0": (4.0, 2.0), "js-1": (3.0, 2.0)}
    facts = {
        "tau": 3.0, "log_likelihood_per_token": -1.0, "repeated_4grams": 0.5, "divergence_spent": 3.2,
        "answer_tokens": 64.0, "drafts": {"agreement": 0.7, "regret_median": 1.25, "below": {"1": 0.4}},
    }  # fmt: skip
    names = {stories.label(name, "exact", n): both[i] for name, both in tau.items() for i, n in enumerate(args.chains)}
    answers = {name: [{"tau": value, "target_forwards": 10}] for name, value in names.items()}
    record = {"methods": dict.fromkeys(names, facts), "prompts": [{"methods": answers}] * 2}
    lk, js = (stories.over_seeds(record, loss, "exact", args) for loss in args.losses)
    assert (lk["chain"], js["chain"]) == (4, 8) and lk["nats_per_token"] == pytest.approx(0.05)
    assert lk["tokens_per_cost"] == pytest.approx(2.8 / 1.24) and js["tokens_per_cost"] == pytest.approx(3.5 / 1.48)
    assert js["x_public"]["ratio"] == pytest.approx(3.5 / 1.48 / (2.0 / 1.48))
    assert js["x_first"]["ratio"] == pytest.approx(3.5 / 1.48 / (2.8 / 1.24)) and lk["x_first"]["ratio"] == 1.0


def test_a_ladder_compares_rules_on_every_rung(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fsd_bench.worth.forecasts.RULES", ())
    words = f"--target {toy.target} --rungs noise:0.02 --prompts {toy.prompts} --rules draft-only alone --batch 2"
    words += " --depth 4 --max-new-tokens 8 --forecast --work work --json ladder.json --figure ladder.png"
    assert ladder.main(words.split()) == 0
    record = json.loads((tmp_path / "ladder.json").read_text())
    assert record["settings"]["target"] == "target" and str(tmp_path) not in json.dumps(record["rungs"])
    rung = record["rungs"]["noise:0.02"]
    exact, lossy, alone = (rung["rules"][rule] for rule in ("exact", "draft-only", "alone"))
    assert lossy["gain"]["ratio"] == pytest.approx(lossy["tau"] / exact["tau"], rel=1e-4) and lossy["tau"] > 1
    assert alone["gain"] is None and alone["differences"].keys() == lossy["differences"].keys()
    assert rung["forecast"]["exact"]["tau"] == pytest.approx(exact["tau"], rel=0.2) and rung["drafts"]["count"] > 0
    assert record["forecast_error"]["cases"] == 1 and record["forecast_error"]["mean_error"] < 0.3
    kept = list((tmp_path / "work").glob("*.json"))
    before = [file.stat().st_mtime_ns for file in kept]
    old = {name: json.loads(json.dumps(rung)) for name in ("first", "second", "third")}
    agreement, gains = [0.1, 0.2, 0.3, rung["drafts"]["agreement"]], [10.0, 20.0, 30.0, lossy["gain"]["ratio"]]
    for other, share, gain in zip(old.values(), agreement[:3], gains[:3], strict=True):
        other["drafts"]["agreement"], other["rules"]["draft-only"]["gain"]["ratio"] = share, gain
    (tmp_path / "old.json").write_text(json.dumps({"rungs": old}))
    monkeypatch.chdir(tmp_path)
    assert ladder.main([*words.split(), "--join", "old.json"]) == 0
    assert len(before) == 2 and [file.stat().st_mtime_ns for file in kept] == before, "a finished rung is kept"
    assert (tmp_path / "ladder.png").stat().st_size > 1000
    joined = json.loads((tmp_path / "ladder.json").read_text())
    assert joined["rungs"] == {**old, "noise:0.02": rung}
    monkeypatch.chdir(tmp_path)
    assert ladder.main([*words.split(), "--join", "ladder.json"]) == 0, "a joined rung only gains its forecast"
    assert json.loads((tmp_path / "ladder.json").read_text())["rungs"] == joined["rungs"]
    ranked = joined["correlations"]["gain of draft-only"]
    assert ranked["rungs"] == 4 and ranked["agreement"] == pytest.approx(spearmanr(agreement, gains).statistic)


def test_routing_mixes_the_target_with_the_drafter_alone(tmp_path: Path) -> None:
    facts = {"exact": (2.0, 0.6), "tilted": (4.0, 0.5), "alone": (None, 0.0)}
    rules = {rule: {"tau": tau, "score": score} for rule, (tau, score) in facts.items()}
    found = ladder.routing_of(rules, depth=4, cost=0.1)  # rounds of 1.4 forwards: 0.7, 0.35 and 0.1 per token
    assert {rule: row["tokens_per_cost"] for rule, row in found.items()} == pytest.approx(
        {"exact": 1 / 0.7, "tilted": 1 / 0.35, "alone": 10.0}
    )
    assert {rule: row["routed"] for rule, row in found.items()} == pytest.approx(
        {"exact": 0.6, "tilted": 0.25, "alone": 0.0}
    )
    half = 1 / (0.5 * 0.7 + 0.5 * 0.1)  # tokens per cost of half of the prompts by either
    assert 1 / 0.7 < half < found["tilted"]["tokens_per_cost"], "so it routes more than half"
    assert ladder.routing_of({**rules, "alone": {"tau": None, "score": None}}, 4, 0.1) == {}
    ladder.write_routing({"a": {"routing": found}, "b": {"routing": {}}}, 0.1, tmp_path / "routing.png")
    assert (tmp_path / "routing.png").stat().st_size > 1000


def test_quality_is_equal_within_the_bounds() -> None:
    assert ladder.is_model("smollm2-135m-maths") and not ladder.is_model("shipped")
    same = {name: {"mean": 0.0} for name in ladder.BOUNDS}
    assert ladder.within(same) and ladder.within({"copied_4grams": {"mean": -0.5}})
    assert not ladder.within({**same, "copied_4grams": {"mean": 0.03}})
    assert not ladder.within({**same, "score": {"mean": -0.03}})
