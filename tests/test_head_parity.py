"""Our logits of public heads are those of their authors' own modelling code, step by step, to 1e-5.

The heads are synthetic, in other programs' spellings. The numbers in ``golden/head-parity.json`` were made by
tests/parity_toys.py at commit 603da78, with checkouts of SafeAILab/EAGLE and sgl-project/SpecForge and with speculators
0.9.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fsd_infer import Target
from fsd_train.models.unroll import unroll
from tests.families import load_head

GOLDEN = Path(__file__).parent / "golden" / "head-parity.json"
V, H, VD, INNER, LAYERS = 50, 32, 20, 48, 8
LENGTH, STEPS = 11, 3  # of the text; of the chains, of which each runs on the head's own outputs
SHOWN = slice(0, 3)  # logits per position in the golden file
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": V,
    "max_position_embeddings": 128, "rope_theta": 500.0, "rope_scaling": None, "num_hidden_layers": 1,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


def values(name: str, *shape: int) -> Tensor:
    """Numbers from -1 to 1 that depend on name and place alone, on every machine."""
    count = torch.Size(shape).numel()
    phase = sum(ord(letter) * (place + 1) for place, letter in enumerate(name))
    wave = torch.sin(torch.arange(1, count + 1, dtype=torch.float64) * 12.9898 + phase) * 43758.5453
    return ((wave - wave.floor()) * 2 - 1).float().view(shape)


def matrix(name: str, rows: int, columns: int) -> Tensor:
    return values(name, rows, columns) * (3 / columns) ** 0.5


def norm(name: str) -> Tensor:
    return 1 + 0.3 * values(name, H)


def target_model() -> LlamaForCausalLM:
    config = LlamaConfig(**{**LLAMA, "num_hidden_layers": LAYERS})
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.data = matrix(name, *parameter.shape) if parameter.ndim == 2 else norm(name)
    return model.eval()


def layer_tensors(prefix: str, read: int) -> dict[str, Tensor]:
    """A decoder layer whose queries, keys and values read ``read`` numbers."""
    made = {
        "self_attn.q_proj": (32, read), "self_attn.k_proj": (16, read), "self_attn.v_proj": (16, read),
        "self_attn.o_proj": (H, 32), "mlp.gate_proj": (INNER, H), "mlp.up_proj": (INNER, H),
        "mlp.down_proj": (H, INNER),
    }  # fmt: skip
    tensors = {f"{prefix}{name}.weight": matrix(name, *shape) for name, shape in made.items()}
    tensors[f"{prefix}post_attention_layernorm.weight"] = norm("post")
    if read > H:
        tensors |= {f"{prefix}{name}.weight": norm(name) for name in ("hidden_norm", "input_layernorm")}
    return tensors


def eagle3_tensors(prefix: str, fc_norm: bool) -> dict[str, Tensor]:
    ids = torch.arange(VD) * 2 + 3
    tensors = {
        "fc.weight": matrix("fc", H, 3 * H),
        "norm.weight": norm("final"),
        "lm_head.weight": matrix("head", VD, H),
        "d2t": ids - torch.arange(VD),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True),
        **layer_tensors(prefix, 2 * H),
    }
    norms = {f"fc_norm.{place}.weight": norm(f"fc_norm {place}") for place in range(3)}
    return {**tensors, **(norms if fc_norm else {})}


EAGLE3_CONFIG = {
    **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD, "target_hidden_size": H,
}  # fmt: skip


def speculators_config(**options: bool) -> dict[str, Any]:
    algorithm = {
        "algorithm": "eagle3", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
    }  # fmt: skip
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_config": algorithm,
        "transformer_layer_config": dict(LLAMA), "draft_vocab_size": VD, "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5], **options,
    }  # fmt: skip


def heads(target: Target) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Config and tensors by name, as their programs write them."""
    table = {"embed_tokens.weight": target.model.get_input_embeddings().weight.detach().clone()}
    eagle = {"fc.weight": matrix("fc", H, 2 * H), "fc.bias": 0.1 * values("bias", H), **layer_tensors("layers.0.", H)}
    without = {name: value for name, value in EAGLE3_CONFIG.items() if name != "target_hidden_size"}
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}}
    of_speculators = {**eagle3_tensors("layers.0.", False), **table}
    with_norms = {**eagle3_tensors("layers.0.", True), **table}
    return {
        "EAGLE-1/2": ({**LLAMA, "bias": True}, {**eagle, **table}),
        "EAGLE-3, SafeAILab": (without, eagle3_tensors("midlayer.", False)),
        "EAGLE-3, SpecForge": ({**EAGLE3_CONFIG, **nested, "fc_norm": True}, eagle3_tensors("midlayer.", True)),
        "EAGLE-3, speculators": (speculators_config(), of_speculators),
        "EAGLE-3.1, speculators": (speculators_config(fc_norm=True, norm_output=True), with_norms),
        "EAGLE-3, speculators, norm before residual": (speculators_config(norm_before_residual=True), of_speculators),
    }


@pytest.mark.parametrize("name", json.loads(GOLDEN.read_text()))
@torch.no_grad()
def test_logits_are_those_that_the_authors_code_gave(name: str, tmp_path: Path) -> None:
    target = Target(target_model())
    config, tensors = heads(target)[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    head = load_head(tmp_path, target)
    tokens = (torch.arange(1, LENGTH + 1) * 7 % V)[None]
    features = values("features", 1, LENGTH, H)
    if head.config.layout == "eagle3":
        assert head.config.fused_layers == [1, 3, 4]
        features = torch.cat([features, 2 * values("fused", 1, LENGTH, 3 * H)], -1)
    outputs = unroll(head, head.embed(tokens, target), features, STEPS, torch.arange(LENGTH)[None])
    read = head.readout(torch.cat(outputs))
    ours = target.lm_logits(read) if head.lm_head is None else head.lm_head(read)
    theirs = torch.tensor(json.loads(GOLDEN.read_text())[name])
    for step in range(STEPS):  # a chain's step s reads token r + s + 1, which the last ones lack
        end = LENGTH - step
        torch.testing.assert_close(ours[step, :end, SHOWN], theirs[step, :end], atol=1e-5, rtol=1e-5)
        assert float(ours[step, :end].std()) > 0.1
