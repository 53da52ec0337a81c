"""Synthetic heads in other programs' spellings, and those programs' own modelling code run on them.

    python -m tests.parity_toys PEERS        # writes tests/golden/head-parity.json

PEERS holds what is run: ``EAGLE`` and ``SpecForge``, checkouts of SafeAILab/EAGLE and sgl-project/SpecForge, and
``speculators``, the package installed there (`pip install --target PEERS/speculators speculators==0.9.0 --no-deps` and
what it imports). Nothing of them is needed to compare with the numbers that they gave.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

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


def norm(name: str, size: int = H) -> Tensor:
    return 1 + 0.3 * values(name, size)


def target_model() -> LlamaForCausalLM:
    config = LlamaConfig(**{**LLAMA, "num_hidden_layers": LAYERS})
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.data = matrix(name, *parameter.shape) if parameter.ndim == 2 else norm(name)
    return model.eval()


def layer_tensors(prefix: str, read: int, first: bool = True) -> dict[str, Tensor]:
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


def eagle_tensors() -> dict[str, Tensor]:
    embeddings = target_model().get_input_embeddings().weight.detach().clone()
    fc = {"fc.weight": matrix("fc", H, 2 * H), "fc.bias": 0.1 * values("bias", H), "embed_tokens.weight": embeddings}
    return {**fc, **layer_tensors("layers.0.", H)}


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
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": VD,
    "target_hidden_size": H,
}


def speculators_config(target: Path, **options: bool) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": dict(LLAMA),
        "draft_vocab_size": VD,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        **options,
    }


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_heads(root: Path) -> dict[str, Path]:
    """The heads by name, written as their programs do."""
    target = root / "target"
    target_model().save_pretrained(target)
    without = {name: value for name, value in EAGLE3_CONFIG.items() if name != "target_hidden_size"}
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}}
    new = {"fc_norm": True, "norm_output": True}
    table = {"embed_tokens.weight": target_model().get_input_embeddings().weight.detach().clone()}
    return {
        "EAGLE-1/2": _write(root / "eagle", {**LLAMA, "bias": True}, eagle_tensors()),
        "EAGLE-3, SafeAILab": _write(root / "eagle3", without, eagle3_tensors("midlayer.", False)),
        "EAGLE-3, SpecForge": _write(
            root / "specforge", {**EAGLE3_CONFIG, **nested, "fc_norm": True}, eagle3_tensors("midlayer.", True)
        ),
        "EAGLE-3, speculators": _write(
            root / "speculators", speculators_config(target), {**eagle3_tensors("layers.0.", False), **table}
        ),
        "EAGLE-3.1, speculators": _write(
            root / "speculators31", speculators_config(target, **new), {**eagle3_tensors("layers.0.", True), **table}
        ),
        "EAGLE-3, speculators, norm before residual": _write(
            root / "before", speculators_config(target, norm_before_residual=True),
            {**eagle3_tensors("layers.0.", False), **table},
        ),
    }  # fmt: skip


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """(tokens x_1 … x_L [1, L] at positions 0 … L-1, final features [1, L, H], fused ones [1, L, 3H])."""
    tokens = (torch.arange(1, LENGTH + 1) * 7 % V)[None]
    return tokens, values("features", 1, LENGTH, H), 2 * values("fused", 1, LENGTH, 3 * H)


# what their code makes of them: logits [STEPS, L, Vd or V], of step s at the position where its chain began ----------


def shifted(tokens: Tensor, step: int) -> Tensor:
    return torch.nn.functional.pad(tokens[:, step:], (0, step))


def run_safeailab(peers: Path, directory: Path) -> Tensor:
    """Drafting token by token with a cache, from the end of each beginning of the text."""
    sys.path.insert(0, str(peers / "EAGLE"))
    eagle3 = "d2t" in _stored(directory)
    from eagle.model import cnets, cnets1
    from eagle.model.configs import EConfig

    config = EConfig.from_pretrained(directory / "config.json")
    config.rope_theta, config.rope_scaling = LLAMA["rope_theta"], None  # as in the transformers it was written for
    model: Any = (cnets if eagle3 else cnets1).Model(config, load_emb=False, bias=True).eval()
    missing, surplus = model.load_state_dict(_stored(directory), strict=False)
    target = target_model()
    assert set(missing) <= {"embed_tokens.weight"} and not surplus
    model.embed_tokens.weight.data = target.get_input_embeddings().weight.data
    tokens, features, fused = inputs()
    logits = []
    for end in range(1, LENGTH + 1):
        hidden, cache = model((fused if eagle3 else features)[:, :end], input_ids=tokens[:, :end], use_cache=True)
        hidden = hidden[:, -1:]
        row = []
        for step in range(STEPS):
            row.append(model.lm_head(model.norm(hidden)) if eagle3 else target.lm_head(hidden))
            if end + step >= LENGTH or step + 1 == STEPS:
                continue
            at = tokens[:, end + step : end + step + 1]
            place = torch.tensor([[end + step]])
            hidden, cache = model(hidden, input_ids=at, past_key_values=cache, position_ids=place, use_cache=True)
        logits.append(torch.cat([*row, *[torch.zeros_like(row[0])] * (STEPS - len(row))]))
    return torch.cat(logits, 1).detach()


def run_specforge(peers: Path, directory: Path) -> Tensor:
    """The steps of training-time test, at all positions at once."""
    sys.path.insert(0, str(peers / "SpecForge"))
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    config = LlamaConfig(**json.loads((directory / "config.json").read_text()))
    model: Any = LlamaForCausalLMEagle3(config).eval()
    model.load_state_dict(_stored(directory), strict=False)
    model.embed_tokens.weight.data = target_model().get_input_embeddings().weight.data
    tokens, _, fused = inputs()
    hidden = model.project_hidden_states(fused)
    mask = model.prepare_decoder_attention_mask(torch.ones(1, LENGTH, dtype=torch.bool), hidden, 1, LENGTH, 0)
    cache: list[list[Tensor]] = [[], []]
    logits = []
    for step in range(STEPS):
        hidden = model.backbone(
            model.embed_input_ids(shifted(tokens, step)), hidden, cache, mask, torch.arange(LENGTH)[None]
        )
        logits.append(model.compute_logits(hidden))
    return torch.cat(logits).detach()


def run_speculators(peers: Path, directory: Path) -> Tensor:
    """The same, by their from_pretrained."""
    sys.path.append(str(peers / "speculators"))
    from speculators.models.eagle3.core import Eagle3DraftModel

    model: Any = Eagle3DraftModel.from_pretrained(str(directory)).eval().requires_grad_(False)
    tokens, _, fused = inputs()
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out))
    forward = getattr(model.forward, "_torchdynamo_orig_callable", model.forward)
    room = 128 - LENGTH  # its masks come in blocks; what follows the text changes nothing in it
    padded = torch.nn.functional.pad(fused, (0, 0, 0, room)), torch.nn.functional.pad(tokens, (0, room))
    forward(*padded, torch.zeros(1, 128, dtype=torch.long), ttt_steps=STEPS)
    return torch.cat(logits)[:, :LENGTH].detach()


def _stored(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


PEERS: dict[str, Callable[[Path, Path], Tensor]] = {
    "EAGLE-1/2": run_safeailab,
    "EAGLE-3, SafeAILab": run_safeailab,
    "EAGLE-3, SpecForge": run_specforge,
    "EAGLE-3, speculators": run_speculators,
    "EAGLE-3.1, speculators": run_speculators,
    "EAGLE-3, speculators, norm before residual": run_speculators,
}


def golden_of(logits: Tensor) -> list[Any]:
    """A few logits of each step and position, as they are stored."""
    return [[[round(value, 7) for value in place] for place in step] for step in logits[..., SHOWN].tolist()]


def main() -> None:
    import tempfile

    peers = Path(sys.argv[1])
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    with tempfile.TemporaryDirectory() as root:
        heads = write_heads(Path(root))
        found = {name: golden_of(run(peers, heads[name])) for name, run in PEERS.items()}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
