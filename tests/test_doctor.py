"""`fsd-train doctor` names each fault that is planted, and none in a head without."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsd_core.errors import DataError
from fsd_core.text.encoding import encode_chat
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import EagleDrafter
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_train.cli import main as cli
from fsd_train.commands import overfit as module
from fsd_train.commands.doctor import some_rows
from fsd_train.commands.head_checks import Doctor, runs_of
from fsd_train.data import AnswersDataModule, FeatureStore, cache_features
from tests.families import altered, load_head
from tests.head_toys import EAGLE3, FSD, WIDTH, make_target, train, write_answers
from tests.openai_server import Behaviour, serving
from tests.test_prompts import marked
from tests.text_toys import CHATML, tiny_tokenizer, write_rows


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with target/, answers.jsonl, and trained heads eagle3/ and fsd/."""
    root = tmp_path_factory.mktemp("doctor")
    write_answers(root / "answers.jsonl", Target.from_pretrained(str(make_target(root / "target"))), 96)
    train(root, EAGLE3, steps=60)  # enough to see what is planted; Muon learns more in a step, which takes it longer
    (root / "head").rename(root / "eagle3")
    train(root, FSD, steps=80, optimizer="adamw", lr=1e-2)
    (root / "head").rename(root / "fsd")
    return root


def examine(world: Path, head: Path, out: Path, **options: str) -> dict[str, dict[str, Any]]:
    files = {"target": str(world / "target"), "head": str(head), "data": str(world / "answers.jsonl")}
    arguments = {**files, "rows": "20", "max-new-tokens": "12", "json": str(out / "found.json"), **options}
    status = cli(["doctor", "--overwrite", *(part for item in arguments.items() for part in (f"--{item[0]}", item[1]))])
    found = {line["check"]: line for line in json.loads((out / "found.json").read_text())}
    assert status == int(any(line["ok"] is False for line in found.values()))
    return found


def wrong(found: dict[str, dict[str, Any]]) -> list[str]:
    return [check for check, line in found.items() if line["ok"] is False]


@pytest.mark.parametrize("name", ["eagle3", "fsd"])
def test_nothing_is_wrong_with_a_good_head(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    found = examine(world, world / name, tmp_path)
    assert wrong(found) == [], found
    assert found["agreement"]["ok"] and found["template"]["ok"]
    assert "WRONG" not in capsys.readouterr().out


PERMUTED = {"lm_head.weight": lambda rows: rows.roll(17, 0)}
# check: head, changes of its tensors and config, options of the command, what is said
FAULTS: dict[str, tuple[Any, ...]] = {
    "feature layers": ("eagle3", (), {"fused_layers": [2, 3]}, {}, "layers [1, 2] instead", "fused_layers [1, 2]"),
    "vocabulary map": ("eagle3", PERMUTED, {}, {}, "under other ids", "order"),
    # as a program that knows no final norm: what it scales is gone
    "norms": ("fsd", {"norm.weight": None}, {"final_norm": False}, {"rows": "40"}, "final norm", "final_norm"),
    "dtype": (
        "eagle3", {"fc.weight": lambda weight: weight * 1e5}, {}, {"dtype": "float16"}, "overflows in float16",
        "bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", FAULTS)
def test_a_planted_fault_is_named(check: str, world: Path, tmp_path: Path) -> None:
    head, tensors, config, options, says, fix = FAULTS[check]
    found = examine(world, altered(world / head, tmp_path / "head", config, tensors), tmp_path, **options)
    # numbers that overflow are wrong in other ways, too
    assert check == wrong(found)[0] or (check == "dtype" and check in wrong(found)), found
    assert says in found[check]["says"] and fix in found[check]["fix"]


def test_rows_with_tools_are_held_against_the_template_with_them(tmp_path: Path) -> None:
    target = Target.from_pretrained(str(make_target(tmp_path / "target")))
    target.tokenizer.chat_template = "{% if tools %}{{ tools[0]['name'] + '\n' }}{% endif %}" + CHATML
    row: dict[str, Any] = {"messages": [{"role": "user", "content": "what is it"}], "tools": [{"name": "clock"}]}
    row["prompt_ids"] = encode_chat(target.tokenizer, row["messages"], options={"tools": row["tools"]})
    row["response_ids"] = [5, 6, 7, 8]
    head = EagleHead(EagleConfig.for_target(target, **FSD))
    (with_tools, *_), (without, *_) = (
        Doctor(target, head, [values]).check_rows() for values in (row, {**row, "tools": None})
    )
    assert with_tools.ok and without.ok is False and without.check == "template"
    assert "1 of 1" in without.says and "fsd-train regenerate" in without.fix
    with pytest.raises(DataError, match="no row of up to 8 tokens"):
        Doctor(target, head, [row], max_length=8)


def test_shifted_features(world: Path, tmp_path: Path) -> None:
    """What the head reads is shifted in the cache that it was trained on."""
    shutil.copy(world / "answers.jsonl", tmp_path)
    shutil.copytree(world / "target", tmp_path / "target")
    target = Target.from_pretrained(str(tmp_path / "target"))
    target.capture_layers(EAGLE3["fused_layers"])
    data = AnswersDataModule([str(tmp_path / "answers.jsonl")], validation_fraction=0.0)
    data.setup()
    plain = target.features

    def shifted(ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        features = plain(ids, attention_mask).clone()
        features[:, 1:, WIDTH:] = features[:, :-1, WIDTH:].clone()
        return features

    target.features = shifted  # type: ignore[method-assign]
    rows = [item["input_ids"] for item in data.train_set]
    assert isinstance(cache_features(target, rows, tmp_path / "features", progress=False), FeatureStore)
    train(tmp_path, EAGLE3, features=str(tmp_path / "features"), steps=40)
    found = examine(world, tmp_path / "head", tmp_path)
    assert wrong(found)[0] == "positions" and "token before" in found["positions"]["says"], found


REFUSED = [
    ({"rows": "0"}, "--rows: "),
    ({"head": None}, "--head"),
    ({"url": "here"}, "server 'here': give its address"),
    ({"data": "image.jsonl"}, "image.jsonl:1: the row has images, and doctor feeds a head text alone"),
    ({"data": "image.jsonl", "head": None, "overfit": "9"}, "image.jsonl:1: the row has images, and doctor"),
    ({"data": "other.jsonl"}, "other.jsonl:1: token id 99999 is outside the target's vocabulary"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refusals(
    options: dict[str, str | None], message: str, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(world)
    Path("image.jsonl").write_text('{"prompt_ids": [5, 6], "response_ids": [7, 9], "images": ["a.png"]}\n')
    Path("other.jsonl").write_text('{"prompt_ids": [5, 6], "response_ids": [7, 99999]}\n')
    given = {"target": "target", "head": "fsd", "data": "answers.jsonl", **options}
    with contextlib.suppress(SystemExit):
        assert cli(["doctor", *(part for name, value in given.items() if value for part in (f"--{name}", value))]) == 2
    assert message in capsys.readouterr().err


@contextmanager
def engine(world: Path, head: Path) -> Iterator[str]:
    """A server that decodes with a head, four drafts a round, and counts as vLLM does."""
    target = Target.from_pretrained(str(world / "target"), dtype=torch.float32)
    drafter = EagleDrafter(load_head(head, target), target, TreeShape(4, 1, 5), context_ids=False)
    decoder = FuzzyDecoder(target, drafter)
    rounds: list[int] = []

    def answer(prompt: list[int], limit: int) -> list[int]:
        made = decoder.generate([prompt], max_new_tokens=limit, do_sample=False)
        rounds.extend(runs_of(made.records[0].sources))
        return made.sequences[0]

    with serving(Behaviour(answer, metrics=lambda: counters(rounds))) as url:
        yield url


def counters(rounds: list[int], positions: int = 4) -> str:
    """vLLM's counters after rounds that accepted so many drafts."""
    lines = ["# HELP vllm:spec_decode_num_drafts_total x"]
    lines.append(f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {float(len(rounds))}')
    for place in range(positions):
        labels = f'{{engine="0",model_name="m",position="{place}"}}'
        count = float(sum(run > place for run in rounds))
        lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{labels} {count}")
    return "\n".join(lines) + "\n"


def test_a_server_with_the_head_agrees(world: Path, tmp_path: Path) -> None:
    with engine(world, world / "eagle3") as url:
        found = examine(world, world / "eagle3", tmp_path, url=url, rows="4", **{"max-new-tokens": "16"})
    assert wrong(found) == [] and found["engine's answers"]["ok"] and found["engine's acceptance"]["ok"], found
    assert found["engine's answers"]["says"] == "4 of 4 equal ours"
    theirs, ours = found["engine's acceptance"]["says"].removeprefix("accepted by position: ").split("; ours ")
    assert theirs == ours and len(theirs.split()) == 4


RECIPE = """
model:
  target: TARGET
  head: {layout: eagle3, fused_layers: [1, 2]}
  unroll_steps: 4
  loss: {class_path: fsd_train.losses.EagleLoss, init_args: {w_feature: 0.0, w_ce: 1.0}}
  optimizer: {class_path: fsd_train.models.MuonAdamW, init_args: {lr: 4.0e-3}}
data: {train_files: [], batch_tokens: 512}
"""


def in_this_process(command: list[str], start: Any = subprocess.run, **options: Any) -> Any:
    """A run of `fsd-train` without a process of its own."""
    if command[:3] != [sys.executable, "-m", "fsd_train.cli"]:
        return start(command, **options)
    return SimpleNamespace(returncode=cli(command[3:]))


@pytest.fixture(scope="module")
def learnt(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with head/, which learnt one answer, and found.json, what doctor said of it."""
    root, train = tmp_path_factory.mktemp("learnt"), module._train

    def kept(args: Any, directory: Path, tokens: int) -> float:
        agreed = train(args, directory, tokens)
        shutil.copytree(directory / "head", root / "head")
        return agreed

    (root / "recipe.yaml").write_text(RECIPE.replace("TARGET", str(world / "target")))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_train", kept)
        patched.setattr(module.subprocess, "run", in_this_process)
        patched.setattr(module, "MAX_STEPS", 100)
        overfit(world, root / "found.json", "600", "--config", str(root / "recipe.yaml"))
    return root


def overfit(world: Path, record: Path, *words: str) -> dict[str, dict[str, Any]]:
    files = ["--target", str(world / "target"), "--data", str(world / "answers.jsonl"), "--json", str(record)]
    status = cli(["doctor", "--overwrite", *files, "--max-new-tokens", "32", "--overfit", *words])
    found = {line["check"]: line for line in json.loads(record.read_text())}
    assert status == int(any(line["ok"] is False for line in found.values()))
    return found


def test_what_is_learnt_by_heart_is_accepted(learnt: Path) -> None:
    """Training on one answer, export and decoding agree: nearly every draft of that answer is accepted."""
    found = {line["check"]: line for line in json.loads((learnt / "found.json").read_text())}
    assert found.keys() == {"template", "loss mask", "training", "export", "decoding"}, found
    assert all(found[stage]["ok"] for stage in ("template", "training", "export", "decoding")), found


WHOLE = marked("{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}")
LATE = marked("{{ m['content'][:5] }}{% generation %}{{ m['content'][5:] + '<|end|>' }}{% endgeneration %}")


@pytest.mark.parametrize(
    ("template", "served", "wrong"),
    [(WHOLE, WHOLE, None), (LATE, LATE, "loss mask"), (WHOLE, "System. " + WHOLE, "template")],
)
def test_an_encoding_that_loses_the_answer_is_named(template: str, served: str, wrong: str | None) -> None:
    tokenizer, user = tiny_tokenizer(template), {"role": "user", "content": "what is the answer"}
    prompt = encode_chat(tiny_tokenizer(served), [user])
    answer = tokenizer("it is there<|end|>", add_special_tokens=False).input_ids
    row = {"messages": [user], "prompt_ids": prompt, "response_ids": answer}
    found = module._check_encoding(SimpleNamespace(tokenizer=tokenizer), row, prompt, answer)  # type: ignore[arg-type]
    assert [finding.check for finding in found if not finding.ok] == ([wrong] if wrong else [])


# stage: changes of the learnt head's tensors and config, and how to put it right
STAGES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "vocabulary map": (PERMUTED, {}, "d2t or draft_ids are in another order"),
    "rope": ((), {"rope_theta": 1.5}, "rope_theta"),
}


def retrained(patch: pytest.MonkeyPatch, head: Path, tensors: Any = (), **layer: Any) -> None:
    """`--overfit` finds this head in place of one that it trains."""

    def trained(args: Any, directory: Path, tokens: int) -> float:
        config = json.loads((head / "config.json").read_text())
        config["layer"]["rope_parameters"] |= layer
        altered(head, directory / "head", config, tensors)
        return 1.0

    patch.setattr(module, "_train", trained)


@pytest.mark.parametrize("stage", STAGES)
def test_the_stage_that_loses_what_was_learnt_is_named(
    stage: str, world: Path, learnt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, layer, fix = STAGES[stage]
    retrained(monkeypatch, learnt / "head", tensors, **layer)
    found = overfit(world, tmp_path / "found.json")
    named = [check for check, line in found.items() if line["fix"]]
    assert [check for check in named if check not in ("export", "decoding")] == [stage], found
    assert fix in found[stage]["fix"] and "decoding" in wrong(found), found
    assert "export" not in wrong(found) or fix in found["export"]["fix"], found


def test_what_was_not_learnt_is_not_laid_to_decoding() -> None:
    fine = module.Finding("dtype", True, "")
    doctor: Any = SimpleNamespace(
        check_feeding=list, check_dtype=lambda _: fine, check_positions=lambda: fine,
        decoded=lambda *_: ([], [0.05, 0.0, 0.0, 0.0], []), feeding=SimpleNamespace(agreement=lambda _: 0.04),
    )  # fmt: skip
    for learnt, fix in ((0.04, "first that of training above"), (1.0, "first that of export above")):
        *_, decoding = module._check_head(doctor, learnt, 24, torch.bfloat16)
        assert (decoding.check, decoding.ok, decoding.fix) == ("decoding", False, fix)


def test_messages_beside_ids_are_not_said_to_be_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"messages": [{"role": "user", "content": "it"}], "prompt_ids": [5, 6], "response_ids": [7, 8]}
    rows: Any = SimpleNamespace(
        data=write_rows(tmp_path / "a.jsonl", [row]), strict=True, max_length=9, rows=1, json=None
    )
    assert some_rows(rows, SimpleNamespace(tokenizer=tiny_tokenizer(), vocab_size=99)) == [row]  # type: ignore[arg-type]
    assert not capsys.readouterr().err


def test_a_head_that_learnt_nothing_has_no_wrong_vocabulary_map(world: Path) -> None:
    """Whatever ids it drafts by chance, in many answers or one."""
    target = Target.from_pretrained(str(world / "target"), dtype=torch.float32)
    rows = [json.loads(line) for line in (world / "answers.jsonl").read_text().splitlines()[:20]]
    for seed in range(4):
        torch.manual_seed(seed)
        head = EagleHead(EagleConfig.for_target(target, **EAGLE3, own_lm_head=True))
        for given in (rows, rows[seed : seed + 1]):
            assert Doctor(target, head, given)._remapped() is None


# drafts of 40 that vLLM accepts at each place, tokens that it decodes alike, and what is said of it
IN_VLLM = [(40, 16, True), (4, 16, False), (4, 3, None)]


def test_vllm_is_asked_where_it_is(world: Path, learnt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retrained(monkeypatch, learnt / "head")
    vllm = tmp_path / "python"
    for accepted, same, ok in IN_VLLM:
        vllm.write_text(
            f"#!{sys.executable}\nimport json, pathlib, sys\njob = json.loads(pathlib.Path(sys.argv[2]).read_text())\n"
            "assert pathlib.Path(job['head'], 'config.json').is_file() and job['method'] == 'eagle3', job\n"
            f"reply = dict(same={same}, drafts=40, accepted=[{accepted}] * job['drafted'])\n"
            "pathlib.Path(job['output']).write_text(json.dumps(reply))\n"
        )
        vllm.chmod(0o755)
        monkeypatch.setenv("VLLM_PYTHON", str(vllm))
        line = overfit(world, tmp_path / "found.json")["vllm"]
        assert line["ok"] is ok and f"its first {same} of 32 tokens are those of decoding here" in line["says"], line
