"""The benchmark: how methods are written, its record, its ratios and its files; drafters and assistants."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from fsd_bench import MeasuredAnswer, TimedRun, build_record, likelihood, parse_methods, run
from fsd_bench.base import Comparison
from fsd_bench.intervals import ratio_text
from fsd_bench.likelihood import mean_log_likelihoods
from fsd_bench.record import BenchPrompt
from fsd_bench.report import bench_table, brief_table
from fsd_bench.runner import partial_path
from fsd_bench.runs import RunFile, Trial, read_run
from fsd_bench.settings import RunOptions
from fsd_bench.sweep.settings import SweepOptions
from fsd_core.console import TerminatedError, terminable
from fsd_core.files import jsonable
from fsd_infer import FsdError, Target, TreeShape
from fsd_infer.trees import policy
from fsd_infer.trees.estimates import PolicyStore
from tests.bench_toys import Toy
from tests.families import tiny_prompts
from tests.text_toys import save_tiny_chat_target

METHODS = ["hf-generate", "hf-lookup:4", "plain", "exact", "fuzzy:js:0.3"]
NEW = 10


def toy_run(toy: Toy, methods: list[str], **options: Any) -> dict[str, Any]:
    return run(toy.prompts, methods, **{**toy.options, "max_new_tokens": NEW, "warmup": False, **options})


@pytest.fixture(scope="module")
def record_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record") / "results" / "bench.json"


@pytest.fixture(scope="module")
def record(toy: Toy, record_file: Path) -> dict[str, Any]:
    options = dict(repeat=2, log_likelihood=True, seed=5, command=["fsd-infer", "bench"])
    chain = TreeShape.chain(5)  # left to itself a drafter as large as its target drafts nothing
    return toy_run(toy, METHODS, json_path=record_file, tree=chain, **options)


def test_a_run_with_a_seed_repeats_whatever_the_clock_says(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of ``auto`` follow the text alone then. Without a seed they follow the clock, and the answers them."""
    options = dict(temperature=0.9, tree="auto", max_new_tokens=24, limit=2)

    def answers(clock: int, seed: int | None) -> list[str]:
        draws, now = Random(clock), [0.0]

        def leaps() -> float:
            now[0] += draws.choice((1e-5, 1e-3, 1e-2, 0.5))
            return now[0]

        monkeypatch.setattr(policy, "PolicyStore", partial(PolicyStore, clock=leaps))
        record = toy_run(toy, ["exact@lookup+recycle", "fuzzy:js:0.3"], seed=seed, **options)
        assert record["settings"]["seed"] == seed
        return [run["tokens_sha256"] for row in record["prompts"] for runs in row["methods"].values() for run in runs]

    assert answers(1, 7) == answers(2, 7) != answers(1, 8)
    assert answers(1, None) != answers(2, None)
    with pytest.raises(FsdError, match="learns nothing from requests with a seed"):
        toy_run(toy, ["exact@memory:keep"], seed=7)


def test_greedy_exact_methods_agree_token_for_token(record: dict[str, Any]) -> None:
    for row in record["prompts"]:  # two repeats of four methods
        assert len({run["tokens_sha256"] for name in METHODS[:4] for run in row["methods"][name]}) == 1
    methods = record["methods"]
    assert all(methods[name]["identical_to_baseline"] == 1.0 for name in METHODS[:4])
    for name in ("plain", "hf-generate"):
        assert methods[name]["tau"] == 1.0
        assert methods[name]["target_forwards"] == methods[name]["answer_tokens"] - 1
    for row in record["prompts"]:  # a forward of lookup may emit several; what the prefill emitted is left out
        for once in row["methods"]["hf-lookup:4"]:
            assert 0 < once["target_forwards"] and once["tau"] * once["target_forwards"] <= once["answer_tokens"] - 1
    exact, lossy = methods["exact"], methods["fuzzy:js:0.3"]
    assert lossy["tau"] > exact["tau"] > 1.2
    assert lossy["divergence_spent"] > exact["divergence_spent"] == 0 and lossy["gate_open_fraction"] > 0
    table = bench_table(record)
    speeds = table[table.index("speed") :].splitlines()
    assert [line.split()[0] for line in speeds[3:8]] == METHODS
    brief, spent = brief_table(record).splitlines(), lossy["divergence_spent"] / lossy["answer_tokens"]
    assert brief[2 + METHODS.index("fuzzy:js:0.3")].split()[-2:] == [f"{lossy['tau']:.2f}", f"{spent:.3f}"]


def made(tokens: int, forwards: int, seconds: float, prefill: float) -> TimedRun:
    return TimedRun(seconds, prefill, [MeasuredAnswer(list(range(tokens)), forwards, tokens - 1)])


def test_a_records_numbers_on_a_worked_example() -> None:
    prompts = [BenchPrompt(str(i), category, f"f:{i}", [1]) for i, category in enumerate("aab")]
    comparisons = [
        Comparison(0, 0, [0], {"plain": made(5, 4, 1.0, 0.2), "exact": made(5, 2, 0.5, 0.1)}),
        Comparison(0, 1, [0], {"plain": made(5, 4, 3.0, 0.2), "exact": made(5, 2, 0.5, 0.1)}),
        Comparison(1, 0, [1], {"plain": made(9, 8, 1.8, 0.2), "exact": made(9, 2, 0.45, 0.05)}),
        Comparison(2, 0, [2], {"plain": made(7, 6, 1.4, 0.2), "exact": made(7, 3, 2.8, 0.4)}),
    ]
    record = build_record(prompts, {"plain": {}, "exact": {}}, comparisons)
    exact, plain = record["methods"]["exact"], record["methods"]["plain"]
    # by prompt: plain (5/1 + 5/3)/2, 5, 5 and exact 10, 20, 2.5 tokens per second
    assert plain["tokens_per_second"] == pytest.approx(5) and exact["tokens_per_second"] == pytest.approx(10)
    ratios = record["ratios"]["plain"]["exact"]
    assert ratios["tokens_per_second"]["median"] == pytest.approx(3.0)  # of 10 / (10/3), 4 and 0.5
    assert ratios["seconds_per_answer"]["median"] == pytest.approx(4.0)  # of 2 / 0.5, 4 and 0.5
    assert ratios["decode_tokens_per_second"]["median"] == pytest.approx(10 / ((4 / 0.8 + 4 / 2.8) / 2))
    # 4/2 twice, 8/2 and 6/3: pooled by category, then pooled over all
    assert exact["categories"]["a"]["tau"] == pytest.approx(16 / 6) and exact["categories"]["b"]["tau"] == 2.0
    assert exact["tau_category_mean"] == pytest.approx((16 / 6 + 2) / 2) and exact["tau"] == pytest.approx(22 / 9)
    assert exact["identical_to_baseline"] == 1.0 and exact["answers"] == 3
    assert exact["seconds_total"] == pytest.approx(0.5 + 0.45 + 2.8)


def test_damaged_lines_of_an_unfinished_run_are_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether they were cut, of another run or edited; none is believed, and the loss is said."""
    trial, trials = Trial("plain", 0), {Trial("plain", 0): 1, Trial("plain", 1): 1}
    made = RunFile(tmp_path / "r.jsonl", "bench", {"seed": 1}, trials)
    made.add(trial, TimedRun(1.0, 0.1, [MeasuredAnswer([1], 1, 1, divergence_spent=float("inf"))], {"draft": 0.5}))
    whole = made.path.read_bytes()
    line = json.loads(whole.splitlines()[1])
    assert read_run({"job": line["trial"], "run": line["run"]}) == (trial, made.runs[trial])  # of an earlier version
    foreign = whole.splitlines()[1].replace(b'"group": 0', b'"group": "x"')
    other = whole.splitlines()[1].replace(b'"group": 0', b'"group": 7')
    faster = whole.replace(b'"seconds": 1.0', b'"seconds": 0.5')
    made.path.write_bytes(faster)
    assert faster != whole and RunFile(made.path, "bench", {"seed": 1}, trials).runs == {}
    assert "r.jsonl: line 2 is damaged or was edited" in capsys.readouterr().err
    for line in (b'{"trial": 1', b"[]", b"{}", foreign, other, b"\xff", b"[" * 9999):
        made.path.write_bytes(whole + line + b"\n")
        again = RunFile(made.path, "bench", {"seed": 1}, trials)
        assert again.runs == made.runs and made.path.read_bytes() == whole
    for header in (b"hello\n", b"[]\n", b'{"bench": 3, "settings": 7}\n', b'{"settings": {"seed": 1}}\n', b"\xff\n"):
        made.path.write_bytes(header)
        with pytest.raises(FsdError, match="r.jsonl is not a file of a bench, or has another version"):
            RunFile(made.path, "bench", {"seed": 1}, trials)


def test_a_file_takes_the_runs_of_one_process_at_a_time(tmp_path: Path) -> None:
    """Another would take the file away before its first run, or lose lines that come while it writes what it read."""
    job, path = Trial("plain", 0), tmp_path / "r.json.partial.jsonl"
    first = RunFile(path, "bench", {}, {job: 1})
    begins = (
        lambda: partial_path(tmp_path / "r.json", resume=False, overwrite=False),
        lambda: RunFile(path, "bench", {}, {job: 1}),
    )
    with first.kept():
        for begin in begins * 2:  # the advice after its first run was to delete the file
            with pytest.raises(FsdError, match="another run is writing .*r.json.partial.jsonl. Wait"):
                begin()
            first.add(job, TimedRun(1.0, 0.1, [MeasuredAnswer([1], 1, 1)], {}))
    assert RunFile(path, "bench", {}, {job: 1}).runs == first.runs


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, TerminatedError)])
def test_a_stop_says_what_is_kept(
    number: int, error: type[BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    job, before = Trial("plain", 0), signal.getsignal(signal.SIGTERM)
    at_start = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, at_start))
    for runs in (0, 1):
        file = RunFile(tmp_path / "r.jsonl", "bench", {}, {job: 1}, advice=("add --resume", "another name"))
        with pytest.raises(error), terminable(), file.kept():
            for _ in range(runs):
                file.add(job, TimedRun(1.0, 0.1, [MeasuredAnswer([1], 1, 1)], {}))
            signal.raise_signal(number)
        assert signal.getsignal(signal.SIGTERM) is before
        kept = f"1 finished runs are kept in {tmp_path / 'r.jsonl'}: add --resume.\n" if runs else ""
        assert capsys.readouterr().err == kept and (tmp_path / "r.jsonl").exists() == bool(runs)


def test_a_method_is_read_from_its_text() -> None:
    texts = ["fuzzy:js:0.3:budget=2", "head=exact@/a=b/c@d:e", "vLLM 8=server:http://u@h:8000/v1?x=1#m/n"]
    fuzzy, head, server, shaped = parse_methods([*texts, "exact@a@b@6x4x9x0.5"])
    assert (fuzzy.name, fuzzy.kind, fuzzy.argument) == ("fuzzy:js:0.3:budget=2", "fuzzy", "js:0.3:budget=2")
    assert (head.name, head.text, head.drafter) == ("head", "exact@/a=b/c@d:e", "/a=b/c@d:e")
    assert (server.name, server.kind, server.argument) == ("vLLM 8", "server", "http://u@h:8000/v1?x=1#m/n")
    assert (shaped.drafter, shaped.tree) == ("a@b", TreeShape(6, 4, 9, 0.5))
    assert [spec.kind for spec in parse_methods(["a=exact@none", "b=exact@x", "exact"])] == ["exact"] * 3


WRONG = {
    "exat": "unknown method 'exat'. Did you mean 'exact'",
    "exact@": "name the drafter after '@'", "plain@none": "plain takes no drafter",
    "hf-generate:3": "takes no parameters", "hf-lookup:x": "give a number from 1 to 1024, e.g. hf-lookup:8",
    "hf-assisted": "name the assistant model", "hf-assisted:#3": "name the assistant model",
    "hf-assisted:a#b": "give 1 to 64 drafts, e.g. hf-assisted:DIRECTORY#4",
    "beams:1@none": "give a number from 2 to 64, e.g. beams:4",
    "beams:4:depth=x@none": "is not a number that depth can be", "fuzzy:js:-1@none": "threshold",
    "server:localhost:8000": "give its address", "server:http://h:port": "give its address",
    "server:ftp://h": "give its address", "a=": "unknown method 'a='", "a=b=plain": "unknown method 'b=plain'",
    "a=plain,a=exact": "'a' is named twice", "": "no methods: give at least one",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_wrong_methods_are_refused_before_anything_is_loaded(text: str) -> None:
    with pytest.raises(FsdError, match=WRONG[text]):
        parse_methods(text.split(",") if text else [])


def test_drafters_of_their_own_and_an_assistant(toy: Toy) -> None:
    methods = ["exact", "none=exact@none", f"again=exact@{toy.drafter}", f"assisted=hf-assisted:{toy.drafter}", "plain"]
    methods.append(f"two=hf-assisted:{toy.drafter}#2")
    record = toy_run(toy, methods, limit=2, baselines=["none", "exact"], tree=TreeShape(5, 6, 16))
    facts = record["methods"]
    assert list(facts) == ["exact", "none", "again", "assisted", "plain", "two"]
    assert {made["identical_to_baseline"] for made in facts.values()} == {1.0}
    assert facts["none"]["tau"] == facts["plain"]["tau"] == 1.0 and facts["none"]["drafter"]["name"] == "none"
    assert facts["exact"]["tau"] == facts["again"]["tau"] > 1.2
    assert facts["assisted"]["tau"] > 1.0 and facts["assisted"]["assistant_model"] == str(toy.drafter)
    assert 1.0 < facts["two"]["tau"] <= 3.0 and facts["two"]["tau"] != facts["assisted"]["tau"]
    assert facts["two"]["num_assistant_tokens"] == 2
    assert record["baseline"] == "none" and list(record["ratios"]) == ["none", "exact"]
    assert set(record["ratios"]["exact"]) == {"none", "again", "assisted", "plain", "two"}


def test_lists_and_names_that_are_none_are_told(toy: Toy) -> None:
    """Python would take a text apart letter by letter."""
    for wrong in ({"methods": "plain"}, {"methods": ["plain"], "baselines": "plain"}):
        with pytest.raises(FsdError, match=r"^(methods|baselines) is a list: give \['plain'\]"):
            RunOptions(toy.prompts, **wrong).check()  # type: ignore[arg-type]
    with pytest.raises(FsdError, match="^prompts is a list"):
        SweepOptions(toy.prompts, ["tilted"]).check()  # type: ignore[arg-type]
    for fields, message in (({"prompts": "x"}, "Did you mean 'prompt'"), ({"prompt": "x"}, "names. It has")):
        with pytest.raises(FsdError, match=message):
            toy_run(toy, ["plain"], fields=fields)


def test_an_interval_of_one_prompt_says_so(toy: Toy) -> None:
    record = toy_run(toy, ["plain", "exact"], limit=1)
    one = record["ratios"]["plain"]["exact"]["tokens_per_second"]
    assert one["pairs"] == 1 and ratio_text(one, "median") == f"{one['median']:.2f} [n = 1]"
    assert f" {one['median']:.2f} [n = 1]" in bench_table(record) and "\n1 prompt; " in bench_table(record)


def test_answers_of_one_token_and_of_none_are_reported() -> None:
    """Resampled prompts may all be without rounds, so ratios of forwards have no interval."""

    def timed(length: int, forwards: int) -> TimedRun:
        answer = MeasuredAnswer(list(range(length)), forwards, max(length - 1, 0), finish_reason="stop")
        return TimedRun(1.0, 0.5, [answer], {})

    lengths = (1, 4, 1, 0)
    runs = [{"plain": timed(n, max(n - 1, 0)), "exact": timed(n, n // 4)} for n in lengths]
    comparisons = [Comparison(place, 0, [place], run) for place, run in enumerate(runs)]
    prompts = [BenchPrompt(str(place), "all", "", [1]) for place in range(len(lengths))]
    record = jsonable(build_record(prompts, {"plain": {}, "exact": {}}, comparisons))
    assert record["ratios"]["plain"]["exact"]["target_forwards"]["low"] is None
    assert "0.33 [?, ?]" in bench_table(record)


def test_a_finished_record_is_not_replaced(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "done.json").write_text('{"methods": {}}')
    for resume in (False, True):
        with pytest.raises(FsdError, match="the record .*done.json is there already: add --overwrite"):
            run(toy.prompts, ["plain"], json_path=tmp_path / "done.json", target="no/such-model", resume=resume)


def test_batches_agree_with_single_forwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.from_pretrained(str(save_tiny_chat_target(tmp_path)), dtype=torch.float32)
    pairs = list(zip(tiny_prompts((1, 30, 7, 12, 3, 22)), tiny_prompts((9, 1, 19, 4, 11, 6), seed=1), strict=True))
    expected = []
    for prompt, answer in pairs:
        logits = target.model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        expected.append(float(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).mean()))
    assert max(expected) - min(expected) > 0.1, "the order matters"
    assert mean_log_likelihoods(target, pairs) == pytest.approx(expected, abs=1e-4)

    read: list[int] = []
    scored: list[int] = []
    features, lm_logits = target.features, target.lm_logits
    monkeypatch.setattr(target, "features", lambda ids, mask: (read.append(ids.numel()), features(ids, mask))[1])
    monkeypatch.setattr(target, "lm_logits", lambda x: (scored.append(len(x)), lm_logits(x))[1])
    monkeypatch.setattr(likelihood, "LOGIT_BYTES", 4 * target.vocab_size * 7)
    assert mean_log_likelihoods(target, pairs, batch_tokens=100) == pytest.approx(expected, abs=1e-4)
    assert max(read) <= 100 and len(read) < len(pairs)
    assert max(scored) == 7 and sum(scored) == sum(len(answer) for _, answer in pairs), "answers only, 7 at once"
    assert mean_log_likelihoods(target, []) == []
