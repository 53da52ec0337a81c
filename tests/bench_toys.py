"""A tiny target with a drafter that is often right, saved as directories, and a file of prompts of two categories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.text_toys import save_tiny_chat_target, write_rows


@dataclass(frozen=True)
class Toy:
    target: Path
    drafter: Path
    prompts: Path

    @property
    def options(self) -> dict[str, Any]:
        """What a benchmark or a sweep is to load."""
        return {"target": str(self.target), "drafter": str(self.drafter), "dtype": "fp32"}

    @property
    def models(self) -> list[str]:
        """The same, for the command line."""
        return [word for name, value in self.options.items() for word in (f"--{name}", value)]


def save_toy(directory: Path, hidden_size: int = 32) -> Toy:
    target = save_tiny_chat_target(directory / "target", hidden_size=hidden_size)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data += 0.03 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(directory / "drafter")
    AutoTokenizer.from_pretrained(target).save_pretrained(directory / "drafter")
    rows = [
        {"category": "cats", "turns": ["the cat sat on the mat", "and then?"]},
        {"category": "cats", "prompt": "what is the answer to that"},
        {"category": "ends", "messages": [{"role": "user", "content": "the end"}]},
        {"category": "ends", "prompt": "it is there on the mat"},
    ]
    return Toy(target, directory / "drafter", write_rows(directory / "prompts.jsonl", rows))
