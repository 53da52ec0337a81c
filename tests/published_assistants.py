"""Random Gemma-4 assistants and their targets; what they estimate is what transformers' own class computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fsd_infer import Target
from fsd_infer.drafters.vocabulary import NEVER
from tests.published_blocks import Layout, States
from tests.rules_toy import V

H, WINDOW = 16, 8
LAYER: dict[str, Any] = dict(
    model_type="gemma4_text", vocab_size=V, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, global_head_dim=16, sliding_window=WINDOW, max_position_embeddings=128, eos_token_id=None,
    bos_token_id=None, pad_token_id=None,
)  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "own keys": dict(
        num_hidden_layers=4, num_kv_shared_layers=0, hidden_size_per_layer_input=0, num_global_key_value_heads=1,
        attention_k_eq_v=True, final_logit_softcapping=30.0,
    ),
    "shared keys": dict(num_hidden_layers=6, num_kv_shared_layers=2, hidden_size_per_layer_input=8),
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention"]


def random_model(**options: Any) -> Any:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options)).eval()
    for name, value in model.named_parameters():
        value.data.mul_(4) if value.dim() > 1 else value.data.normal_(1, 0.3)
        if "centroids" in name:
            value.data.normal_()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


@cache
def assisted_target(kind: str) -> Target:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        types = ["sliding_attention", *TYPES] * 2
        given = {**LAYER, **TARGETS[kind], "vocab_size_per_layer_input": V, "hidden_size": H}
        return Target(random_model(**given, layer_types=types[: given["num_hidden_layers"]]))


def assistant(kind: str, ordered: bool = False) -> Layout:
    """Two layers, narrower than the target. An ordered one has two clusters of two tokens and reads one."""
    given = {**LAYER, "hidden_size": 12, "num_hidden_layers": 2, "num_kv_shared_layers": 2, "layer_types": TYPES}
    given |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    given |= {
        name: value
        for name, value in TARGETS[kind].items()
        if name in ("num_global_key_value_heads", "attention_k_eq_v")
    }
    model = random_model(
        model_type="gemma4_assistant", text_config=given, backbone_hidden_size=H, use_ordered_embeddings=ordered,
        num_centroids=2, centroid_intermediate_top_k=1,
    )  # fmt: skip
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.tensor([2, 0, 1, 3]))
    tensors = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    config = model.config.to_dict()
    # transformers lets a node look one place further back than the target's window, at both of its ends
    model.model.config.sliding_window = model.config.text_config.sliding_window = WINDOW - 2

    def estimate(states: States, text: list[int], drafts: list[int]) -> Tensor:
        read = states.model.model(input_ids=torch.tensor([text[:-1]]), return_shared_kv_states=True)
        state, place = read.last_hidden_state[:, -1:], torch.tensor([[len(text) - 1]])
        for token in [text[-1], *drafts]:
            x = torch.cat([states.embed([token])[None], state], -1)
            made = model(inputs_embeds=x, position_ids=place, shared_kv_states=dict(read.shared_kv_states))
            state = made.last_hidden_state
        logits: Tensor = made.logits[0, 0]
        return logits.masked_fill(logits == logits.min(), NEVER) if ordered else logits

    return Layout(config, tensors, estimate, 8, target=lambda: assisted_target(kind))


ASSISTANTS: dict[str, Callable[[], Layout]] = {
    "shared keys of gemma4": lambda: assistant("own keys"),
    "shared keys of gemma4, ordered": lambda: assistant("shared keys", ordered=True),
}
