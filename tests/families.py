"""Small random models of every family the engine is tested on, and a drafter that knows the answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria

from fsd_infer import Drafter, Target, TreeShape, drafters
from fsd_infer.drafters import DraftRequest, DraftSession, EagleDrafter, GraftedDrafter, LMDrafter, RecycleDrafter
from fsd_infer.heads.config import own_fields
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.targets.kinds import attention_for
from fsd_infer.trees.tree import DraftTree, Nodes

VOCAB = 97
WINDOW = 8  # shorter than every tested sequence
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)  # a device; `make test-gpu` runs these

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

_SSD: dict[str, Any] = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=16, mamba_expand=2
)
_DELTA: dict[str, Any] = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
)
_MOE: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
)
_MLA: dict[str, Any] = dict(
    num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
    num_experts=4, num_experts_per_token=2, moe_intermediate_size=32,
)  # fmt: skip
_LINEAR, _CONV = ["linear_attention", "full_attention"], ["conv", "full_attention"]
_THREE: dict[str, Any] = dict(
    head_dim=8, sliding_window=WINDOW, num_hidden_layers=3, layer_types=[*_LINEAR, "sliding_attention"]
)
_SHARED = ["linear_attention", "hybrid"] * 2  # Zamba repeats one block of attention
RECURRENT: dict[str, dict[str, Any]] = {  # keep a state; MiniMax, RWKV and others are refused
    "mamba": dict(state_size=8), "falcon_mamba": dict(state_size=8),
    "jamba": dict(mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, num_experts=4),
    "zamba": dict(mamba_d_state=8, mamba_dt_rank=4, n_mamba_heads=2, num_hidden_layers=4, layers_block_type=_SHARED),
    "mamba2": dict(state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=16),
    "bamba": dict(**_SSD, attn_layer_indices=[1]), "falcon_h1": dict(**_SSD, mamba_d_ssm=64, lm_head_multiplier=0.5),
    "granitemoehybrid": dict(
        **_SSD, layer_types=["mamba", "attention"], num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=32, logits_scaling=2.0,
    ),
    "nemotron_h": dict(
        mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=16, num_hidden_layers=4,
        layers_block_type=["mamba", "attention", "mlp", "moe"], head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, n_group=1, topk_group=1,
    ),
    "zamba2": dict(
        mamba_d_state=8, n_mamba_heads=8, mamba_ngroups=2, chunk_size=16, num_hidden_layers=4,
        layers_block_type=_SHARED, num_mem_blocks=1, use_mem_rope=True,
    ),
    "qwen3_next": dict(**_DELTA, **_MOE, head_dim=8, layer_types=_LINEAR),
    "qwen3_5_text": dict(**_DELTA, head_dim=8, layer_types=_LINEAR),
    "qwen3_5_moe_text": dict(**_DELTA, **_MOE, head_dim=8, layer_types=_LINEAR),
    "olmo_hybrid": dict(**_DELTA, layer_types=_LINEAR), "lara_mini": dict(**_DELTA, **_THREE),
    "kimi_linear": dict(**_MLA, linear_num_heads=4, linear_head_dim=8, layer_types=_LINEAR),
    "bailing_hybrid": dict(**_MLA, head_dim=8, n_group=1, topk_group=1, layer_types=_LINEAR),
    "lfm2": dict(layer_types=_CONV), "lfm3": dict(**_THREE | {"layer_types": [*_CONV, "sliding_attention"]}),
    "lfm2_moe": dict(**_MOE, layer_types=_CONV, num_dense_layers=1),
}  # fmt: skip


def save_head(
    directory: Path, head: EagleHead, target: dict[str, Any], record: Any = None, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write a head as `fsd-train export` does."""
    head.config.target, head.config.training = target, record
    head.save_pretrained(directory, dtype)
    return directory


def altered(source: Path, out: Path, config: Any = None, tensors: Any = ()) -> Path:
    """A copy of a head's or a model's directory that differs in its config and weights.

    Args:
        config: options to replace, or the bytes of the whole file; an option of None is removed.
        tensors: a function that changes all in place, or tensors to replace, or a function of each; None removes a
            tensor, None for all the whole file.
    """
    shutil.copytree(source, out, dirs_exist_ok=True)
    file, weights = out / "config.json", out / "model.safetensors"
    if isinstance(config, bytes):
        file.write_bytes(config)
    elif config:
        merged = {**json.loads(file.read_text()), **config}
        file.write_text(json.dumps({name: value for name, value in merged.items() if value is not None}))
    if tensors is None:
        weights.unlink()
    elif tensors:
        stored = load_file(weights)
        if callable(tensors):
            tensors(stored)
        else:
            stored |= {name: value(stored[name]) if callable(value) else value for name, value in tensors.items()}
        kept = {name: value.contiguous() for name, value in stored.items() if value is not None}
        save_file(kept, weights, {"format": "pt"})
    return out


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
    config = AutoConfig.for_model(family, **{**_COMMON, **{**FAMILIES, **RECURRENT}.get(family, {}), **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_for(config)).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(scale)
    model.generation_config.eos_token_id = None
    return model


def noisy_model(family: str, **options: Any) -> Any:
    """The same model with perturbed weights: as a drafter it is often, not always, right."""
    noisy, generator = tiny_model(family, **options), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in noisy.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * parameter.std(unbiased=False) * noise)
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
    if head.draft_ids is not None:  # different ones: siblings differ
        head.draft_ids.copy_(torch.arange(len(head.draft_ids)) * (target.vocab_size // len(head.draft_ids)))
    return EagleDrafter(head, target, shape or TreeShape(depth=3, width=3, nodes=8))


def tiny_prompts(lengths: tuple[int, ...] = (5, 13, 9, 21), seed: int = 0) -> list[list[int]]:
    """Random prompts without the padding id."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


# by model, the lengths of prompts and the greedy texts that begin with them: OracleDrafter need not read these ahead
TOLD: WeakKeyDictionary[Any, list[tuple[int, list[int]]]] = WeakKeyDictionary()


def reference(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """New tokens of ``model.generate``, prompt by prompt."""
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    ids = [torch.tensor([prompt], device=model.device) for prompt in prompts]
    texts = [model.generate(row, **options)[0].tolist() for row in ids]
    if options.keys() == {"max_new_tokens", "do_sample"} and not options["do_sample"]:
        TOLD.setdefault(model, []).extend(zip(map(len, prompts), texts))
    return [text[len(prompt) :] for prompt, text in zip(prompts, texts)]


class EndsIn(StoppingCriteria):
    """Stops where the last token is one of these."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.isin(input_ids[:, -1], self.tokens)


class OracleDrafter(Drafter):
    """Random trees in which the target's own greedy continuation hides among wrong siblings.

    The length of the right path differs per row and round. Wrong nodes precede right ones, so accepting a path always
    moves keys and values.
    """

    name = "oracle"
    max_nodes = 13
    max_depth = 4

    def __init__(self, target: Target, seed: int = 0) -> None:
        self.target = target
        self.seed = seed
        self.generator = torch.Generator()
        self.known: dict[tuple[int, ...], list[int]] = {}  # the greedy continuations of texts

    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        self.generator.manual_seed(self.seed)  # the same trees for the same texts
        for length, text in TOLD.get(self.target.model, []):
            for end in range(length, len(text)):
                self.known.setdefault(tuple(text[:end]), text[end : end + self.max_depth])
        return _OracleSession(self, first_tokens)

    def tree(self, text: list[int], path: list[int]) -> Nodes:
        """Three siblings at each depth, below the last of those above, which is the right token as far as they go."""
        right = int(torch.randint(0, len(path) + 1, (1,), generator=self.generator))
        tokens, parents, scores = [text[-1]], [0], [0.0]
        for depth in range(self.max_depth):
            drawn = torch.randperm(VOCAB - 1, generator=self.generator)[:4] + 1
            siblings = [token for token in drawn.tolist() if token not in path[depth : depth + 1]][:3]
            if depth < right:
                siblings[-1] = path[depth]
            parents += [len(tokens) - 1] * 3
            tokens += siblings
            scores += [-1.0 - depth] * 3
        return tokens, parents, scores


class _OracleSession(DraftSession):
    def __init__(self, drafter: OracleDrafter, first_tokens: Tensor) -> None:
        self.drafter = drafter
        self.texts = [[token] for token in first_tokens.tolist()]
        self.ahead = 28

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        for text, row, count in zip(self.texts, tokens.tolist(), counts.tolist(), strict=True):
            text += row[:count]

    def keep_rows(self, rows: Tensor) -> None:
        self.texts = [self.texts[row] for row in rows.tolist()]

    def draft(self, roots: Tensor) -> DraftTree:
        assert [text[-1] for text in self.texts] == roots.tolist()
        rows = [self.drafter.tree(text, path) for text, path in zip(self.texts, self._continuations(), strict=True)]
        tree = DraftTree.of_lists(rows, VOCAB, self.drafter.target.device)
        q_logits = torch.randn(*tree.tokens.shape, VOCAB, generator=self.drafter.generator).to(tree.tokens.device)
        nodes = torch.arange(tree.tokens.shape[1], device=q_logits.device)
        return replace(tree, q_logits=q_logits, q_index=torch.where(tree.has_children, nodes, -1))

    def _continuations(self) -> list[list[int]]:
        """The greedy continuation of each text. It is read far ahead at first, and once: this takes most of a test."""
        target, known, depth = self.drafter.target, self.drafter.known, self.drafter.max_depth
        unknown = sorted({tuple(text) for text in self.texts} - known.keys(), key=len)
        for length, texts in groupby(unknown, key=len):
            ids = torch.tensor(list(texts), device=target.device)
            room = min(self.ahead, (target.max_positions or 10**6) - length)
            if room > 0:
                ids = target.model.generate(ids, max_new_tokens=room, do_sample=False)
            for text in ids.tolist():
                for end in range(length, max(length, len(text) - depth) + 1):
                    known[tuple(text[:end])] = text[end : end + depth]
        self.ahead = depth
        return [known[tuple(text)] for text in self.texts]


FREE: dict[str, Callable[[int], Drafter]] = {
    "none": drafters.NoDrafter, "lookup": drafters.LookupDrafter, "memory": drafters.MemoryDrafter,
    "recycle": RecycleDrafter,
    "forgetful": partial(RecycleDrafter, keep=False),
}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "head": {}, "reduced": {"draft_vocab_size": 64}, "fused": {"fused_layers": [1, 0], "final_norm": True},
}  # fmt: skip


def drafter_of(
    name: str, target: Target, shape: TreeShape | None = None, nodes: int | None = None, **options: Any
) -> Any:
    """A drafter by name: of FREE, of HEADS, "oracle", "lm" that is often right, "self", or "A+B", a graft of B onto A.

    Args:
        shape: of the trees of a head or a small LM.
        nodes: of a graft.
        options: of a head.
    """
    main, plus, side = name.rpartition("+")
    if plus:
        return GraftedDrafter(drafter_of(main, target, shape, nodes, **options), drafter_of(side, target), nodes)
    if name in FREE:
        return FREE[name](target.vocab_size)
    if name in HEADS:
        return tiny_head(target, shape, **{**HEADS[name], **options})
    if name == "oracle":
        return OracleDrafter(target)
    small = target if name == "self" else noisy_copy(target)
    return LMDrafter(small, target, shape)


def noisy_copy(target: Target) -> Target:
    model = noisy_model(target.config.model_type, vocab_size=target.vocab_size)
    return Target(model.to(target.device, target.dtype))


def tell(session: DraftSession, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
    """Extend the session's texts, on the device and on the host, as the engine does."""
    session.extend(tokens, features, counts)
    session.extend_on_host([row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)])


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
