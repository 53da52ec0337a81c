"""CUDA graphs as a caller meets them; tests/test_recorded_rounds.py checks on the simulated device what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsd_infer import FsdError, FuzzyDecoder, Target
from fsd_infer.cli.main import main
from fsd_infer.drafters import TreeShape
from tests.families import drafter_of, reference, tiny_model, tiny_prompts

KINDS = ["none", "head", "reduced", "head+lookup", "lm"]
FAMILIES = ["llama", "gemma2", "gemma3_text", "mistral", "gpt2"]
CASES = [*((kind, "llama") for kind in KINDS), *(("oracle", family) for family in FAMILIES)]


def decoder_of(kind: str, family: str = "llama", device: str = "cpu") -> FuzzyDecoder:
    target = Target(tiny_model(family).to(device))
    return FuzzyDecoder(target, drafter_of(kind, target, TreeShape.chain(3) if kind == "lm" else None))


@pytest.mark.gpu
@pytest.mark.parametrize("kind, family", CASES)
def test_a_gpu_replays_its_own_recordings(kind: str, family: str) -> None:
    decoder = decoder_of(kind, family, "cuda")
    target: Any = decoder.target
    decoder.use_graphs()
    for length in (24, 180):  # other memory, hence other recordings
        expected = reference(target.model, tiny_prompts(), max_new_tokens=length)
        for prompts in (tiny_prompts(), tiny_prompts(), tiny_prompts(), tiny_prompts()[:1]):
            made = decoder.generate(prompts, max_new_tokens=length, do_sample=False)
            assert made.sequences == expected[: len(prompts)]
    assert target.recorded is not None and target.recorded.refused is None


def test_a_cpu_has_no_cuda_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = decoder_of("none")
    with pytest.raises(FsdError, match="CUDA graphs need CUDA, but the target is on cpu"):
        decoder.use_graphs()
    decoder.target.model.save_pretrained(tmp_path)
    argv = ["generate", "--target", str(tmp_path), "--drafter", "none", "--device", "cpu", "--prompt", "x"]
    assert main([*argv, "--cuda-graphs"]) == 2
    assert "CUDA graphs need CUDA, but the target is on cpu" in capsys.readouterr().err
