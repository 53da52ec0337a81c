"""Small random models of every family the engine is tested on, and a drafter that knows the answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fsd_infer import Drafter, EagleDrafter, Target, TreeShape
from fsd_infer.drafters import DraftRequest, DraftSession
from fsd_infer.heads.config import own_fields
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.targets.loading import attention_for
from fsd_infer.tree import DraftTree

VOCAB = 97
WINDOW = 8  # shorter than every tested sequence

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None, pad_token_id=0,
)  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": dict(sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1),
    "qwen3": dict(sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1, head_dim=8),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=8),
    "gemma2": dict(sliding_window=WINDOW, head_dim=8),
    "gemma3_text": dict(sliding_window=WINDOW, head_dim=8, num_hidden_layers=7),
    "mistral": dict(sliding_window=WINDOW), "mixtral": dict(sliding_window=WINDOW, num_local_experts=4),
    "phi3": dict(sliding_window=WINDOW), "gpt_neox": {}, "gpt2": {}, "opt": dict(ffn_dim=64, word_embed_proj_dim=32),
    "olmo2": {}, "cohere": {}, "stablelm": {},
    "granite": dict(logits_scaling=2.0, residual_multiplier=0.5, embedding_multiplier=2.0),
    "falcon": dict(new_decoder_architecture=False, multi_query=True),
    "gpt_oss": dict(sliding_window=WINDOW, num_local_experts=4, head_dim=8),
}  # fmt: skip


def save_head(
    directory: Path, head: EagleHead, target: dict[str, Any], record: Any = None, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write a head as `fsd-train export` does."""
    head.config.target, head.config.training = target, record
    head.save_pretrained(directory, dtype)
    return directory


def load_head(directory: Path, target: Target | None = None) -> EagleHead:
    """A frozen head in float32."""
    return EagleHead.from_pretrained(directory, target, dtype=torch.float32).requires_grad_(False)


def options_of(head: EagleHead) -> dict[str, Any]:
    """Its shape and options, without those of the layer that are at their defaults."""
    defaults = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    options = {name: getattr(head.config, name) for name in own_fields() - {"target", "training"}}
    return {**options, "layer": {**defaults, **options["layer"]}}


def tiny_model(family: str, seed: int = 0, scale: float = 4.0, **options: Any) -> Any:
    """A random fp32 model; weights are scaled up so that its distributions are peaked and its answers varied."""
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_for(config)).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(scale)
    model.generation_config.eos_token_id = None
    return model


def noisy_model(family: str) -> Any:
    """The same model with perturbed weights: as a drafter it is often, not always, right."""
    noisy = tiny_model(family)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(0.1 * parameter.std(unbiased=False) * torch.randn_like(parameter))
    return noisy


def circling_model() -> Any:
    """A model whose next token depends on the last one alone: sooner or later its greedy answers are periodic."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    return model


def tiny_head(target: Target, shape: TreeShape | None = None, **options: Any) -> EagleDrafter:
    """A random head, which is of little use: the same one each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = EagleHead(EagleConfig.for_target(target, **options))
    return EagleDrafter(head, target, shape or TreeShape(depth=3, width=3, nodes=8))


def tiny_prompts(lengths: tuple[int, ...] = (5, 13, 9, 21), seed: int = 0) -> list[list[int]]:
    """Random prompts without the padding id."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def reference(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """New tokens of ``model.generate``, prompt by prompt."""
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    ids = [torch.tensor([prompt], device=model.device) for prompt in prompts]
    return [model.generate(row, **options)[0, row.shape[1] :].tolist() for row in ids]


class OracleDrafter(Drafter):
    """Random trees in which the target's own greedy continuation hides among wrong siblings.

    The length of the right path differs per row and round. Wrong nodes precede right ones, so accepting a path always
    moves keys and values.
    """

    name = "oracle"
    max_nodes = 12
    max_depth = 4

    def __init__(self, target: Target, seed: int = 0) -> None:
        self.target = target
        self.seed = seed
        self.generator = torch.Generator()

    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        self.generator.manual_seed(self.seed)  # the same trees for the same texts
        return _OracleSession(self, first_tokens)


class _OracleSession(DraftSession):
    def __init__(self, drafter: OracleDrafter, first_tokens: Tensor) -> None:
        self.drafter = drafter
        self.texts = [[token] for token in first_tokens.tolist()]

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        for text, row, count in zip(self.texts, tokens.tolist(), counts.tolist(), strict=True):
            text += row[:count]

    def select(self, rows: Tensor) -> None:
        self.texts = [self.texts[row] for row in rows.tolist()]

    def draft(self, roots: Tensor) -> DraftTree:
        assert [text[-1] for text in self.texts] == roots.tolist()
        trees = [self._tree(text, path) for text, path in zip(self.texts, self._continuations(), strict=True)]
        parents = torch.tensor([parent for _, parent, _ in trees])
        q_logits = torch.randn(len(trees), self.drafter.max_nodes, VOCAB, generator=self.drafter.generator)
        inner = torch.zeros_like(parents, dtype=torch.bool).scatter_(1, parents[:, 1:], True)
        device = self.drafter.target.device
        return DraftTree(
            tokens=torch.tensor([tokens for tokens, _, _ in trees]).to(device),
            parents=parents.to(device),
            scores=-torch.tensor([depths for _, _, depths in trees]).float().to(device),
            q_logits=q_logits.to(device),
            q_index=torch.where(inner, torch.arange(self.drafter.max_nodes), -1).to(device),
        )

    def _continuations(self) -> list[list[int]]:
        """The greedy continuation of each text, texts of one length together: one by one they take most of a test."""
        target = self.drafter.target
        found: dict[int, list[int]] = {}
        for length in {len(text) for text in self.texts}:
            rows = [row for row, text in enumerate(self.texts) if len(text) == length]
            room = min(self.drafter.max_depth, (target.max_positions or 10**6) - length)
            ids = torch.tensor([self.texts[row] for row in rows], device=target.device)
            if room > 0:
                ids = target.model.generate(ids, max_new_tokens=room, do_sample=False)
            found.update(zip(rows, ids[:, length:].tolist(), strict=True))
        return [found[row] for row in range(len(self.texts))]

    def _tree(self, text: list[int], path: list[int]) -> tuple[list[int], list[int], list[int]]:
        generator = self.drafter.generator
        path = path[: int(torch.randint(0, self.drafter.max_depth + 1, (1,), generator=generator))]
        right = len(path)
        tokens, parents, depths = [text[-1]], [0], [0]
        on_path = 0  # the node that the right path has reached
        for step in range(self.drafter.max_depth):
            last = step + 1 == self.drafter.max_depth
            room = self.drafter.max_nodes - len(tokens)
            wrong = room if last else min(2, room)
            follow = step < right
            choices = [t for t in range(1, VOCAB) if step >= len(path) or t != path[step]]
            siblings = [
                choices[int(i)]
                for i in torch.randperm(len(choices), generator=generator)[: wrong - int(last and follow)]
            ]
            if follow:
                siblings.append(path[step])
            for token in siblings:
                tokens.append(token)
                parents.append(on_path)
                depths.append(depths[on_path] + 1)
            on_path = len(tokens) - 1
        return tokens, parents, depths


def recorded_drafts(
    kind: type[DraftSession], look: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Any, DraftTree]]:
    """Will hold what ``look`` says of each session of a kind as it drafts, and the tree."""
    found: list[tuple[Any, DraftTree]] = []
    draft = kind.draft

    def recorded(session: DraftSession, roots: Tensor) -> DraftTree:
        found.append((look(session), draft(session, roots)))
        return found[-1][1]

    monkeypatch.setattr(kind, "draft", recorded)
    return found
