"""A toy target whose heads learn in seconds, its answers, and the training of a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fsd_core.text.encoding import encode_chat
from fsd_infer import Target
from fsd_train.models.eagle import EagleModule
from tests.text_toys import tiny_tokenizer, write_rows
from tests.train_toys import answers_of, options, trainer

WIDTH = 64
EAGLE3: dict[str, Any] = {"layout": "eagle3", "fused_layers": [1, 2]}
FSD: dict[str, Any] = {"final_norm": True, "feature_scale": True}


def make_target(directory: Path) -> Path:
    """A llama of four layers with the tiny tokenizer, whose next token follows mostly from the last few."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    special = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": 1, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False, **special,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in name or "lm_head" in name else 0.12)
    torch.nn.init.normal_(model.model.norm.weight, std=1.0)  # a head without it is clearly worse
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_answers(path: Path, target: Target, rows: int) -> Path:
    """Sampled answers, so that no two are alike, with their prompts in the chat template."""
    torch.manual_seed(1)
    asked = [[{"role": "user", "content": f"what is {number * 37 % 101}"}] for number in range(rows)]
    prompts = [encode_chat(target.tokenizer, messages) for messages in asked]
    answers: dict[int, list[int]] = {}
    for length in sorted(set(map(len, prompts))):
        batch = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[number] for number in batch])
        out = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=28, min_new_tokens=28, do_sample=True,
            temperature=0.7, pad_token_id=0,
        )  # fmt: skip
        answers.update(zip(batch, out[:, length:].tolist(), strict=True))
    found = [
        {"messages": messages, "response": "", "prompt_ids": prompts[number], "response_ids": answers[number]}
        for number, messages in enumerate(asked)
    ]
    return write_rows(path, found)


def train(
    root: Path,
    head: dict[str, Any],
    features: str | None = None,
    steps: int = 100,
    optimizer: str = "muon",
    lr: float = 4e-3,
) -> None:
    eagle3 = head.get("layout") == "eagle3"
    chosen = options(
        head=head, draft_vocab_size=280 if eagle3 else None, unroll_steps=1, lr=lr, warmup_steps=20,
        loss_args={"w_feature": 0.0, "w_ce": 1.0}, optimizer=optimizer,
    )  # fmt: skip
    module = EagleModule(str(root / "target"), **chosen)
    data = answers_of(root, validation_fraction=0.0, batch_tokens=512, features=features)
    trainer(root / "run", steps, every=steps, limit_val_batches=0, gradient_clip_val=1.0).fit(module, data)
    module.export(root / "head")
