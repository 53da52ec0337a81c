"""Our logits of public heads are those of their authors' own modelling code, step by step, to 1e-5."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer import Target
from fsd_infer.heads.checkpoint import load_head
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.export import TargetFacts, export_head
from fsd_infer.heads.head import EagleHead
from fsd_train.unroll import unroll
from tests.parity_toys import (
    GOLDEN,
    LAYERS,
    LENGTH,
    LLAMA,
    PEERS,
    SHOWN,
    STEPS,
    VD,
    H,
    V,
    inputs,
    target_model,
    write_heads,
)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(target_model())


def our_logits(directory: Path, target: Target) -> Tensor:
    """[STEPS, L, Vd or V]: of step s at the position where its chain began."""
    head = load_head(directory, target)
    tokens, final, fused = inputs()
    eagle3 = head.config.layout == "eagle3"
    features = torch.cat([final, fused], -1) if eagle3 else final
    if eagle3:
        assert head.config.fused_layers == [1, 3, 4]
    with torch.no_grad():
        outputs = unroll(head, head.embed(tokens, target), features, STEPS, torch.arange(LENGTH)[None])
        read = head.readout(torch.cat(outputs))
        return target.lm_logits(read) if head.lm_head is None else head.lm_head(read)


def check(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    for step in range(STEPS):  # a chain's step s reads token r + s + 1, which the last ones lack
        end = LENGTH - step
        torch.testing.assert_close(ours[step, :end], theirs[step, :end], atol=1e-5, rtol=1e-5)
        assert float(ours[step, :end].std()) > 0.1


@pytest.mark.parametrize("name", PEERS)
def test_logits_are_those_that_the_authors_code_gave(name: str, heads: dict[str, Path], target: Target) -> None:
    """Golden numbers; `python -m tests.parity_toys PEERS` regenerates them."""
    theirs = torch.tensor(json.loads(GOLDEN.read_text())[name])
    check(our_logits(heads[name], target)[..., SHOWN], theirs)


@pytest.mark.parametrize("name", PEERS)
def test_logits_are_those_of_the_authors_code(
    name: str, heads: dict[str, Path], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = os.environ.get("FSD_PEERS")
    if peers is None:
        pytest.skip("FSD_PEERS names no directory with other programs' code (see tests/parity_toys.py)")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    check(our_logits(heads[name], target), PEERS[name](Path(peers), heads[name]))


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True, "num_layers": 2}], ids=str)
def test_speculators_reads_the_config_that_we_write(
    options: dict[str, Any], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if peers := os.environ.get("FSD_PEERS"):
        monkeypatch.setattr(sys, "path", [*sys.path, str(Path(peers) / "speculators")])
    pytest.importorskip("speculators", reason="no speculators: install it, or see tests/parity_toys.py for FSD_PEERS")
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig

    head = EagleHead(EagleConfig.for_target(target, layout="eagle3", draft_vocab_size=VD, **options))
    facts = TargetFacts("owner/target", ["LlamaForCausalLM"], LAYERS, lambda ids: target.lm_head_rows(ids)[0])
    export_head(head, tmp_path, "speculators", facts)
    config = Eagle3SpeculatorConfig.from_pretrained(str(tmp_path))
    assert config.eagle_aux_hidden_state_layer_ids == [2, 4, 5] and config.draft_vocab_size == VD
    assert (config.fc_norm, config.norm_output) == (bool(options), bool(options)) and not config.norm_before_residual
    assert config.speculators_config.verifier.name_or_path == "owner/target"
    layer = config.transformer_layer_config
    assert (layer.hidden_size, layer.num_hidden_layers, layer.vocab_size) == (H, options.get("num_layers", 1), V)
    assert layer.rope_parameters["rope_theta"] == LLAMA["rope_theta"] and layer.head_dim == 8
