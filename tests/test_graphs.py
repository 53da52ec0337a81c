"""Recorded forwards. Without a GPU a recording is a trace of what torch computes, with every number fixed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fsd_infer import FsdError, FuzzyDecoder, Target
from fsd_infer.cli.main import main
from fsd_infer.device.cuda_graphs import SLOTS
from fsd_infer.drafters import TreeShape
from tests.families import drafter_of, reference, tiny_model, tiny_prompts

GREEDY: dict[str, Any] = dict(max_new_tokens=14, do_sample=False)


class Traces:
    """Records as a CUDA graph does: shapes, addresses and numbers that Python looked at are those of the recording."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], Any]) -> Any:
        self.recorded += 1
        traced = make_fx(run)()
        outputs = tuple(torch.full_like(out, torch.nan) for out in traced())

        def replay() -> None:
            self.replayed += 1
            for buffer, out in zip(outputs, traced(), strict=True):
                buffer.copy_(out)

        return outputs, replay


def decoder_of(kind: str, family: str = "llama", device: str = "cpu") -> FuzzyDecoder:
    target = Target(tiny_model(family).to(device))
    return FuzzyDecoder(target, drafter_of(kind, target, TreeShape.chain(3) if kind == "lm" else None))


def recorded(kind: str, family: str = "llama") -> tuple[FuzzyDecoder, Traces]:
    decoder = decoder_of(kind, family)
    decoder.use_graphs(traces := Traces())
    return decoder, traces


KINDS = ["none", "head", "reduced", "head+lookup", "lm"]
FAMILIES = ["llama", "gemma2", "gemma3_text", "mistral", "gpt2"]
CASES = [*((kind, "llama") for kind in KINDS), *(("oracle", family) for family in FAMILIES)]


@pytest.mark.parametrize("kind, family", CASES)
def test_greedy_tokens_are_those_of_generate(kind: str, family: str) -> None:
    decoder, traces = recorded(kind, family)
    prompts = tiny_prompts((5, 13, 9))
    expected = reference(decoder.target.model, prompts, **GREEDY)
    counts = [row.target_forwards for row in decoder_of(kind, family).generate(prompts, **GREEDY).stats.rows]
    recordings = [0]
    for _ in range(3):  # over the keys and values of the one before
        found = decoder.generate(prompts, **GREEDY)
        assert found.sequences == expected
        assert [row.target_forwards for row in found.stats.rows] == counts
        recordings.append(traces.recorded)
    assert 0 < recordings[2] == recordings[3] < traces.replayed  # what came twice is recorded, once
    assert decoder.generate(prompts[:1], **GREEDY).sequences == expected[:1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind, family", CASES)
def test_a_gpu_replays_its_own_recordings(kind: str, family: str) -> None:
    decoder = decoder_of(kind, family, "cuda")
    target = decoder.target
    decoder.use_graphs()
    for length in (24, 180):  # other memory, hence other recordings
        expected = reference(target.model, tiny_prompts(), max_new_tokens=length)
        for prompts in (tiny_prompts(), tiny_prompts(), tiny_prompts(), tiny_prompts()[:1]):
            made = decoder.generate(prompts, max_new_tokens=length, do_sample=False)
            assert made.sequences == expected[: len(prompts)]
    assert target.graphs is not None and target.graphs.refused is None


@pytest.mark.parametrize("rule", ["exact", "fuzzy-strict:tv:0.4"])
@pytest.mark.parametrize("kind", ["reduced", "lm"])
def test_draws_and_trees_are_those_without(rule: str, kind: str) -> None:
    options: dict[str, Any] = dict(max_new_tokens=14, do_sample=True, temperature=0.8, seed=3)
    wanted = decoder_of(kind).generate(tiny_prompts((5, 11)), rule, **options)
    found = recorded(kind)[0].generate(tiny_prompts((5, 11)), rule, **options)
    assert found.sequences == wanted.sequences
    assert found.stats.tau == wanted.stats.tau
    assert found.stats.divergence_spent == pytest.approx(wanted.stats.divergence_spent, abs=1e-4)


def test_a_text_that_grows_beyond_a_recording_gets_another() -> None:
    decoder, traces = recorded("none")
    prompts, length = tiny_prompts((SLOTS - 30,)), 50
    config = decoder.target.config
    config.max_position_embeddings = 2 * SLOTS
    expected = reference(decoder.target.model, prompts, max_new_tokens=length)
    assert decoder.generate(prompts, max_new_tokens=length, do_sample=False).sequences == expected
    assert traces.recorded == 2


def test_what_cannot_be_recorded_runs_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    attempts = 0

    def refuses(run: Callable[[], Any]) -> Any:
        nonlocal attempts
        attempts += 1
        run()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    decoder = decoder_of("head")
    decoder.use_graphs(refuses)
    with caplog.at_level(logging.WARNING):
        found = decoder.generate(tiny_prompts(), **GREEDY).sequences
    assert found == reference(decoder.target.model, tiny_prompts(), **GREEDY)
    assert attempts == len(caplog.records) == 2  # the target's and the head's
    assert "operation not permitted when stream is capturing" in caplog.text and "more" not in caplog.text


def test_a_cpu_has_no_cuda_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = decoder_of("none")
    with pytest.raises(FsdError, match="CUDA graphs need CUDA, but the target is on cpu"):
        decoder.use_graphs()
    decoder.target.model.save_pretrained(tmp_path)
    argv = ["generate", "--target", str(tmp_path), "--drafter", "none", "--device", "cpu", "--prompt", "x"]
    assert main([*argv, "--cuda-graphs"]) == 2
    assert "CUDA graphs need CUDA, but the target is on cpu" in capsys.readouterr().err
