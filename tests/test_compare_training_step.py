"""A training step beside EAGLE's: equal before timed, the same batches in turns; and the rate through the data path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks import training_throughput
from benchmarks.compare_training_step import Options, main, peak_memory, summarise, time_steps
from benchmarks.eagle_step import MODEL, SCRIPT, checkout_facts, eagle_batch
from benchmarks.training_batches import choose_rows, make_batches
from fsd_infer.errors import FsdError
from fsd_infer.target import Target
from fsd_train.data import read_answers
from fsd_train.unroll import supervised
from tests.train_toys import save_toy_target, write_answers

# A stand-in for the repository: our own writing, with what the benchmark relies on and the same mathematics.
PEER_MODEL = """
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        layer = LlamaConfig(**{name: getattr(config, name) for name in names}, rope_parameters=rope)
        layer._attn_implementation = "sdpa"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size).requires_grad_(False)
        self.layers = nn.ModuleList([LlamaDecoderLayer(layer, 0)])
        self.layers[0].input_layernorm = nn.Identity()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.angles = LlamaRotaryEmbedding(layer)

    def forward(self, hidden_states, input_ids, attention_mask):
        x = self.fc(torch.cat([self.embed_tokens(input_ids), hidden_states], -1))
        out = self.layers[0](x, position_embeddings=self.angles(x, torch.arange(x.shape[1])[None]))
        return out[0] if isinstance(out, tuple) else out
"""
PEER_SCRIPT = """
import a_module_that_nobody_has
train_config = {"lr": args.lr, "p_w": 0.1}
def top_accuracy(output, target):
    return (output.argmax(-1) == target.argmax(-1)).sum()
def compute_loss(target, target_p, predict, mask):
    logits = head(predict)
    weight = mask / mask.sum()
    feature = (weight * criterion(predict, target)).sum() / target.shape[-1]
    return feature, -(weight * target_p * logits.log_softmax(-1)).sum(), logits
criterion = nn.SmoothL1Loss(reduction="none")
optimizer = optim.AdamW(model.parameters(), lr=train_config["lr"])
num_warmup_steps = 5
total_steps = 100
is_warmup = True
for epoch in range(3):
    for number, data in enumerate(progress(train_loader)):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            predict = model(data["hidden_states"], data["input_ids"], data["attention_mask"])
            with torch.no_grad():
                target_p = head(data["target"]).softmax(-1)
            vloss, ploss, out_head = compute_loss(data["target"], target_p, predict, data["loss_mask"][..., None])
            loss = vloss + train_config["p_w"] * ploss
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            correct += top_accuracy(out_head, target_p)
"""


def write_peer(root: Path, script: str = PEER_SCRIPT) -> Path:
    """A checkout with these two files."""
    for name, text in ((MODEL, PEER_MODEL), (SCRIPT, script)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / MODEL).with_name("__init__.py").write_text("")
    return root


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, answers.jsonl and peer/."""
    root = tmp_path_factory.mktemp("toys")
    target = Target.from_pretrained(str(save_toy_target(root / "target")), dtype=torch.float32)
    write_answers(root / "answers.jsonl", target, rows=16)
    write_peer(root / "peer")
    return root


def compare(toys: Path, peer: Path, output: Path, *more: str) -> int:
    return main(
        [
            "--eagle", str(peer), "--json", str(output), "--target", str(toys / "target"), "--data",
            str(toys / "answers.jsonl"), "--draft-vocab-size", "40", "--batch-tokens", "96", "--batches", "2",
            "--repeats", "3", "--warmup", "1", "--no-memory", *more,
        ]
    )  # fmt: skip


def options(toys: Path, **changes: Any) -> Options:
    values = {
        "target": str(toys / "target"), "eagle": str(toys / "peer"), "precision": "32-true", "draft_vocab_size": 40,
        "lr": 1e-3, "seed": 0, "threads": torch.get_num_threads(),
    }  # fmt: skip
    return Options(**{**values, **changes})


def test_the_record_of_a_comparison(toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["ours", "ours-draft-vocab", "eagle", "eagle-accuracies"]
    assert compare(toys, toys / "peer", tmp_path / "record.json", "--methods", ",".join(names)) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    for vocabulary in ("whole", "draft"):
        found = record["check"][vocabulary]
        assert found["ours"] == pytest.approx(found["eagle"], rel=1e-4)
        assert found["gradient_difference"] < 1e-3
    assert record["check"]["whole"]["ours"] != pytest.approx(record["check"]["draft"]["ours"], rel=1e-3)
    assert list(record["methods"]) == names
    # the timed steps run in bf16 and begin with the same weights
    first = {name: facts["first_loss"] for name, facts in record["methods"].items()}
    assert first["ours"] == pytest.approx(record["check"]["whole"]["ours"], rel=0.02)
    assert first["ours"] == pytest.approx(first["eagle"], rel=0.02)
    assert first["eagle"] == pytest.approx(first["eagle-accuracies"], rel=1e-6)
    assert all(len(facts["seconds"]) == 3 for facts in record["methods"].values())
    assert len(record["ratios"]) == 4 and len(record["batches"]) == 2
    assert record["peer"]["sha256"][SCRIPT] and record["environment"]["command"].startswith("python -m benchmarks.")
    assert "ours / eagle" in capsys.readouterr().out


def test_another_loss_is_not_timed(toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer = write_peer(tmp_path / "peer", PEER_SCRIPT.replace('"p_w": 0.1', '"p_w": 0.11'))
    assert compare(toys, peer, tmp_path / "record.json") == 1
    assert "do not compute the same" in capsys.readouterr().err
    assert not (tmp_path / "record.json").exists()


def test_what_is_no_checkout_is_named(toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FsdError, match="git clone"):
        checkout_facts(tmp_path)
    peer = write_peer(tmp_path / "peer", PEER_SCRIPT.replace("compute_loss", "other_name"))
    assert compare(toys, peer, tmp_path / "record.json") == 1
    assert "check out commit" in capsys.readouterr().err


def test_the_batch_in_their_form(toys: Path) -> None:
    rows, _ = read_answers([toys / "answers.jsonl"])
    (batch,) = make_batches(choose_rows(rows, 0.0), Target.from_pretrained(str(toys / "target")), 1, 64)
    data = eagle_batch(batch)
    ids, mask = batch["input_ids"], batch["loss_mask"]
    counted = data["loss_mask"].nonzero()
    assert len(counted) == int(supervised(mask, 1).sum()) > 0
    for row, i in counted.tolist():
        assert data["input_ids"][row, i] == ids[row, i + 1]
        assert torch.equal(data["target"][row, i], batch["features"][row, i + 1].float())
        assert mask[row, i + 1] and mask[row, i + 2]
    assert not batch["features"][batch["attention_mask"] == 0].any()


def test_rows_are_chosen_by_their_share_of_answer(toys: Path) -> None:
    rows, _ = read_answers([toys / "answers.jsonl"])
    shares = [float(rows[i]["loss_mask"].float().mean()) for i in range(len(rows))]
    limit = sorted(shares)[len(shares) // 2] - 1e-6  # one of them, whatever the rounding
    assert len(choose_rows(rows, limit)) == sum(share >= limit for share in shares) < len(rows)
    with pytest.raises(FsdError, match="min-answer-share"):
        choose_rows(rows, 1.0)


def test_methods_take_turns_on_the_same_batch() -> None:
    seen: list[tuple[str, int]] = []

    def step(name: str) -> Any:
        def run(batch: int) -> torch.Tensor:
            seen.append((name, batch))
            return torch.tensor(float(len(seen)))

        return run

    seconds, losses = time_steps({"a": step("a"), "b": step("b")}, batches=2, repeats=2, warmup=1)
    assert seen == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 0), ("b", 0)]
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}
    assert losses == {"a": 1.0, "b": 2.0}


def test_ratios_compare_the_same_batch() -> None:
    seconds = {"ours": [1.0, 2.0, 1.0], "eagle": [3.0, 6.0, 2.0]}
    memory = {"ours": {"before": 100, "peak": 150}, "eagle": {"before": 100, "peak": 300}}
    found = summarise(seconds, {"ours": 1.0, "eagle": 1.0}, memory, [10, 20, 10])
    (ratio,) = found["ratios"].values()
    assert ratio["faster"]["median"] == 3.0 and ratio["smaller"] == 4.0
    assert found["methods"]["ours"]["supervised_tokens_per_second"] == 10.0
    assert found["methods"]["ours"]["step_bytes"] == 50
    unknown = summarise(seconds, {"ours": 1.0, "eagle": 1.0}, {"ours": None, "eagle": None}, [10, 20, 10])
    assert unknown["ratios"]["ours / eagle"]["smaller"] is None


def test_memory_of_a_step(toys: Path, tmp_path: Path) -> None:
    rows, _ = read_answers([toys / "answers.jsonl"])
    setup = options(toys)
    batches = make_batches(choose_rows(rows, 0.0), Target.from_pretrained(setup.target), 2, 96)
    torch.save((batches, torch.arange(40)), tmp_path / "workload.pt")
    found = peak_memory("ours", setup, str(tmp_path / "workload.pt"))
    assert found is None or 0 < found["before"] <= found["peak"]


def test_throughput_through_the_data_path(toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = {
        "trainer": {"precision": "32-true", "gradient_clip_val": 1.0},
        "model": {
            "target": str(toys / "target"),
            "head": {"final_norm": True, "fused_layers": [0]},
            "draft_vocab_size": 40,
            "unroll_steps": 3,
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = [
        "--json", str(tmp_path / "record.json"), "--recipe", str(tmp_path / "recipe.yaml"), "--data",
        str(toys / "answers.jsonl"), "--unroll", "1,2", "--rows", "8", "--steps", "2", "--warmup", "1", "--repeats",
        "1", "--batch-tokens", "96", "--set", "noise=0.1",
    ]  # fmt: skip
    assert training_throughput.main(words) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert [found["unroll_steps"] for found in record["unrolled"]] == [1, 2]
    assert record["model"]["noise"] == 0.1
    for found in record["unrolled"]:
        (run,) = found["runs"]
        assert len(run["seconds"]) == 2 and min(run["tokens"]) > 0
        assert found["tokens_per_second"] == pytest.approx(sum(run["tokens"]) / sum(run["seconds"]))
    # one order of batches for all
    assert record["unrolled"][0]["runs"][0]["tokens"] == record["unrolled"][1]["runs"][0]["tokens"]
    assert "supervised tok/s" in capsys.readouterr().out
    assert training_throughput.main([*words, "--set", "noise"]) == 1
    assert "KEY=VALUE" in capsys.readouterr().err
