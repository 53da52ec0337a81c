"""The forward that measurements repeat is the target's own, and the trial of compiled ones compares the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import compile_trial
from fsd_infer import Target
from fsd_infer.tuning.probe import Probe
from tests.families import VOCAB, tiny_model


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_probe_repeats_the_targets_forward(family: str) -> None:
    model = tiny_model(family)
    probe = Probe(Target(model), 20, 6)
    text = torch.arange(26)[None] % VOCAB
    with torch.no_grad():
        expected = model(text).logits[:, 20:]
        features = model.get_decoder()(text[:, :20])[0]
    torch.testing.assert_close(probe.features, features, atol=1e-4, rtol=1e-4)
    for nodes in (6, 1, 4, 6):
        assert torch.equal(probe.tokens(nodes), text[:, 20 : 20 + nodes])
        found = probe(nodes)
        torch.testing.assert_close(found, expected[:, :nodes], atol=1e-4, rtol=1e-4)
        assert torch.equal(probe(nodes, probe.visible(nodes)), found)


def test_compile_trial_compares_equal_forwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama", scale=2.0).save_pretrained(tmp_path / "target")
    out = tmp_path / "new" / "trial.json"
    words = ["--target", str(tmp_path / "target"), "--variants", "eager", "fused", "--context", "16", "--repeats", "4"]
    assert compile_trial.main([*words, "--nodes", "1", "5", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [(row["variant"], row["nodes"]) for row in record["rows"]] == [
        ("eager", 1), ("fused", 1), ("eager", 5), ("fused", 5),
    ]  # fmt: skip
    assert all(row["relative_difference"] < 0.02 for row in record["rows"])
    assert {path.name for path in out.parent.iterdir()} == {out.name}
    assert "fused" in capsys.readouterr().out
    assert compile_trial.main(["--target", str(tmp_path / "none"), "--json", str(out)]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err and json.loads(out.read_text()) == record
