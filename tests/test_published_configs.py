"""Configs of heads that other programs publish: what they may say in several ways, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_core.errors import FsdError
from fsd_infer import Target
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.heads.stored_parts import plain_layer
from tests.published_assistants import LAYER, TARGETS, TYPES, assisted_target, random_model
from tests.published_blocks import RANK, THETA, WINDOW, H, Layout, States, tiny_target, z_lab
from tests.published_heads import layout
from tests.rules_toy import V
from tests.test_published_heads import PROMPTS, TREE, drafted, target

Z_LAB = "dflash of z-lab"
SLIDING = {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": ...}
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
OF_SPARK = {"projector_type": "dspark", "markov_rank": RANK, "target_layer_ids": [2, 0]}
SPARK = {"architectures": ["DFlashDraftModel"], "dflash_config": z_lab(**OF_SPARK)["dflash_config"]}
SAID: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # a layout, and two ways to say the same
    "M-RoPE, which block heads copy": (Z_LAB, {"rope_scaling": MROPE, "partial_rotary_factor": 0.25}, {}),
    "rotary options by type, and one beside them that agrees": (
        Z_LAB,
        {
            "rope_theta": ..., "rope_scaling": ...,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": THETA}, "rope_theta": THETA},
        },
        {},
    ),
    "windows by their first layer": (
        Z_LAB, {**SLIDING, "max_window_layers": 1}, {**SLIDING, "layer_types": ["full_attention", "sliding_attention"]}
    ),
    "no window before the 28th layer": (Z_LAB, SLIDING, {}),
    "windows by use_swa, bidirectional": (
        Z_LAB, z_lab(use_swa=True, swa_window_size=WINDOW),
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW, "is_causal": False},
    ),
    "windows by use_swa, causal": (
        Z_LAB, z_lab(use_swa=True, swa_window_size=WINDOW, causal=True) | {"sliding_window": 9},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW},
    ),
    "windows by types, whatever use_swa says": (
        "dflash with sinks", {"dflash_config": z_lab(use_swa=True, attention_sink_bias=True)["dflash_config"]}, {}
    ),
    "slots by shift_label": ("dspark of SpecForge", SPARK | z_lab(**OF_SPARK, shift_label=False),
                             SPARK | {"sample_from_anchor": False}),
}  # fmt: skip


@pytest.mark.parametrize("way", SAID)
def test_options_may_be_said_in_several_ways(way: str, tmp_path: Path) -> None:
    name, *ways = SAID[way]
    found, wanted = (
        drafted(load_drafter(str(layout(name).write(tmp_path / f"{i}", **each)), target(name), TREE), PROMPTS)
        for i, each in enumerate(ways)
    )
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.q_logits, wanted.q_logits)


@pytest.mark.parametrize(("said", "width"), [({"model_type": "qwen3"}, 128), ({"head_dim": None}, 4), ({}, 4)])
def test_widths_that_a_config_leaves_out(said: dict[str, Any], width: int) -> None:
    """Qwen3's configs have a default of their own."""
    layer = plain_layer({"hidden_size": H, "num_attention_heads": 4, **said}, "qwen3")
    assert (layer["head_dim"], layer["num_key_value_heads"]) == (width, 4)


def test_names_of_model_optimizer(tmp_path: Path) -> None:
    """Its DSpark heads have no modules for the correction and the confidence. All may lie below further modules."""
    made = layout("dspark of SpecForge")
    names = {name: re.sub(r"logit_head\.(markov_head\.|confidence_head\.(?=proj))", "", name) for name in made.tensors}
    names = {name: re.sub("^proj", "confidence_proj", other) for name, other in names.items()}
    theirs = replace(made, tensors={names[name]: value for name, value in made.tensors.items()})
    assert {"markov_w1.weight", "confidence_proj.weight"} <= theirs.tensors.keys()
    theirs = replace(theirs, tensors={f"model.draft_model.{name}": value for name, value in theirs.tensors.items()})
    found, wanted = (
        drafted(load_drafter(str(one.write(tmp_path / place)), target(), TREE), PROMPTS)
        for place, one in (("theirs", theirs), ("usual", made))
    )
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.q_logits, wanted.q_logits)


@pytest.mark.parametrize("whole", [True, False])
def test_medusa_heads_may_draft_a_part_of_the_vocabulary(tmp_path: Path, whole: bool) -> None:
    """By vLLM's token_map, with LM heads of these ids or of all."""
    made, ids = layout("medusa of vLLM"), [3, 0, 1]
    heads = {
        name: value if whole else value[ids] for name, value in made.tensors.items() if name.startswith("lm_heads")
    }
    part = replace(made, tensors={**made.tensors, **heads, "token_map": torch.tensor(ids)})
    drafter = load_drafter(str(part.write(tmp_path / "head", truncated_vocab_size=3)), target(), TREE)
    tree, states = drafted(drafter, PROMPTS), States.of(target().model, PROMPTS[0])
    assert tree.draft_ids is not None and tree.draft_ids.tolist() == ids
    with torch.no_grad():
        for drafts in ([], [1]):
            node = next(i for i in range(tree.tokens.shape[1]) if int(tree.ancestors[0, i].sum()) == 1 + len(drafts))
            wanted = made.estimate(states, PROMPTS[0], drafts)[ids]
            torch.testing.assert_close(tree.q_logits[0, tree.q_index[0, node]], wanted, rtol=1e-5, atol=1e-5)


def test_medusa_heads_may_be_lm_heads_alone(tmp_path: Path) -> None:
    made = layout("medusa")
    tables = {name.replace(".2.", ".0."): value for name, value in made.tensors.items() if ".linear." not in name}
    tree = drafted(load_drafter(str(replace(made, tensors=tables).write(tmp_path)), target(), TREE), PROMPTS)
    with torch.no_grad():
        wanted = tables["0.0.weight"] @ States.of(target().model, PROMPTS[0]).final[-1]
    torch.testing.assert_close(tree.q_logits[0, tree.q_index[0, 0]], wanted, rtol=1e-5, atol=1e-5)


def test_one_lm_head_of_medusa_may_serve_all(tmp_path: Path) -> None:
    """The first, whatever lies beside it: by vLLM's original_lm_head, or where there is no other."""
    made = layout("medusa of vLLM")
    alone = replace(made, tensors={name: x for name, x in made.tensors.items() if not name.startswith("lm_heads.")})
    alone.tensors["lm_head.weight"] = made.tensors["lm_heads.0.weight"]
    written = made.write(tmp_path / "first", original_lm_head=True), alone.write(tmp_path / "alone")
    first, only = (drafted(load_drafter(str(place), target(), TREE), PROMPTS) for place in written)
    assert torch.equal(first.tokens, only.tokens) and torch.equal(first.q_logits, only.q_logits)


Changed = dict[str, Any]
SCALED = {"rope_scaling": {"factor": 4.0}}
REFUSED: dict[str, tuple[str, Changed, str]] = {
    "a slot that could mean two things": (
        "dflash of z-lab", {"architectures": ["MyDraft"]}, '"sample_from_anchor": false'
    ),
    "a default that differs": ("dspark of speculators", {"sample_from_anchor": ...}, "must say sample_from_anchor"),
    "two numberings": ("dflash of speculators", {"target_layer_ids": [1, 3]}, "the latter should be one less"),
    "a layer that is not there": (
        "dflash of z-lab", z_lab(target_layer_ids=[0, 9]), r"layers \[0, 9\]; .* has 0 to 3, each once"
    ),
    "another target": ("dflash of z-lab", {"num_target_layers": 36}, "for a target of 36 layers"),
    "a second version": ("dflash of z-lab", z_lab(conv_kernel_size=4), "conv_group_size .* from 1 to 16, got None"),
    "sinks": ("dflash of z-lab", z_lab(attention_sink_bias=True), "attention_sink_bias is True .* and False by"),
    "channels in no groups": (
        "dflash2", z_lab(conv_kernel_size=2, conv_group_size=5), "conv_group_size in config.json is 5, which does not"
    ),
    "candidates without end": ("dflash2", z_lab(selector_rank=3, selector_top_k=5), "selector_top_k .* from 1 to 4"),
    "a scale of embeddings": ("dflash2", z_lab(input_embedding_scale=2.0), "input_embedding_scale 2.0, which is not"),
    "another refiner": ("xpress", {"xpress_mlp_ratio": 4}, "wrong shape .'refiner_head.mlp_down.weight'"),
    "two values": ("dflash of z-lab", z_lab(block_size=8), "says block_size twice"),
    "no mask": ("dflash of z-lab", z_lab(mask_token_id=None), "no mask_token_id"),
    "another vocabulary": ("dflash of z-lab", {"vocab_size": 9}, "drafts over 9 tokens"),
    "a missing correction": ("dflash of z-lab", z_lab(projector_type="domino"), "whose tensors are missing"),
    "another Markov head": ("dspark of DeepSpec, gated", {"markov_head_type": "rnn"}, "those of a gated head"),
    "Gemma's layers": ("dflash of DeepSpec", {"architectures": ["Gemma4DSparkModel"]}, "layers are Gemma's"),
    "another correction": ("dflash of z-lab", {"architectures": ["LiLiCorrDraftModel"]}, "as LiLiCorr does"),
    "too many layers": ("dflash of z-lab", {"num_hidden_layers": 3}, "names 3 layers"),
    "another architecture": ("hydra", {"hydra_head_arch": "prefix-mlp"}, "'prefix-mlp': only \"mlp\""),
    "fewer steps": ("mlp speculator", {"n_predict": 2}, "unexpected"),
    "steps without end": ("mlp speculator, tied", {"n_predict": 10**12}, "from 1 to 64, got 1000000000000"),
    "ties that differ": ("mlp speculator", {"tie_weights": True}, "its emb.1.weight differs from emb.0.weight"),
    "no epsilon": ("p-eagle", {"rms_norm_eps": None}, "does not describe a Llama layer .*'rms_norm_eps'"),
    "a width of its states": ("mlp speculator", {"inner_dim": 7}, "inner_dim is 7 in its config.json, and 12 by"),
    "a scale of its logits": ("medusa of vLLM", {"logit_scale": 0.5}, "logit_scale 0.5, which is not known"),
    "a reduced vocabulary": ("dflash of speculators", {"draft_vocab_size": 77}, "draft_vocab_size is 77 .* and 3 by"),
    "a rank": ("dspark of speculators", {"markov_rank": 9}, f"markov_rank is 9 in its config.json, and {RANK} by"),
    "the final feature": ("dflash of z-lab", z_lab(use_aux_hidden_state=False), "use_aux_hidden_state False"),
    "two directions": ("dflash of z-lab", z_lab(causal=True) | {"is_causal": False}, "says causal twice"),
    "slots in words": ("dspark of speculators", {"sample_from_anchor": "false"}, "must be true or false"),
    "an input in words": ("mlp speculator, tied", {"scale_input": "false"}, "scale_input .* or false, got 'false'"),
    "ground in words": ("hydra", {"grounded_heads": "false"}, "grounded_heads in its config.json must be true or"),
    "features in words": ("dflash of z-lab", z_lab(use_aux_hidden_state="false"), "use_aux_hidden_state .* must be"),
    "biases that are missing": ("medusa of vLLM", {"medusa_fc_bias": True}, "missing .'blocks.0.0.linear.bias'"),
    "a soft cap": ("dflash of z-lab", {"final_logit_softcapping": "30"}, "must be a number from 0, got '30'"),
    "a window": ("dflash with sinks", {"sliding_window": "3"}, "sliding_window .* must be a whole number from 1"),
    "two rotary scalings": ("dflash of z-lab", {"rope_parameters": {"factor": 5.0}, **SCALED}, "says factor twice"),
    "two masks": ("p-eagle", {"ptd_token_id": 1}, r"needs one token of its masks, .* has \[1, "),
    "an unknown activation": ("dflash of z-lab", {"hidden_act": "x"}, "not describe a decoder layer .KeyError: 'x'"),
    "types of layers": ("dflash with sinks", {"layer_types": [[], "full_attention"]}, "not those of 2 full or"),
    "no proposals": ("p-eagle", {"speculators_config": {"proposal_methods": ["greedy"]}}, "not say what it proposes"),
    "LM heads of some": ("medusa", {}, "3 with 2 LM heads"),
    "truncated": ("medusa of vLLM", {"truncated_vocab_size": 2}, "drafts over 2 of 4 ids and has no token_map"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_told_or_run_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    name, changes, words = REFUSED[fault]
    made = layout(name)
    if fault == "LM heads of some":
        made = replace(made, tensors={name: value for name, value in made.tensors.items() if name != "0.2.weight"})
    with pytest.raises(FsdError, match=words):
        load_drafter(str(made.write(tmp_path / "head", **changes)), target(), None)


# assistants of Gemma-4 ------------------------------------------------------------------------------------------------


def gemma(**changes: Any) -> Target:
    """A target without shared keys."""
    types = ["sliding_attention", *TYPES, "sliding_attention"]
    given = {**LAYER, **TARGETS["own keys"], "vocab_size_per_layer_input": V, "hidden_size": H, "layer_types": types}
    return Target(random_model(**given | changes))


def without_projection(made: Layout) -> None:
    del made.tensors["pre_projection.weight"]


def further(made: Layout) -> None:
    made.tensors["model.fusion.weight"] = torch.zeros(16, 12)


def unchanged(made: Layout) -> None:
    pass


FIRST_SLIDES = ["sliding_attention", *["full_attention"] * 3]
FAULTS: dict[str, tuple[Callable[[Layout], None], Callable[[], Target], str]] = {
    "another family": (unchanged, lambda: Target(tiny_target()), "reads the keys of a Gemma-4 target, .* is llama"),
    "another width": (unchanged, lambda: gemma(hidden_size=20), "is for 16 features, and .* has 20"),
    "another vocabulary": (unchanged, lambda: gemma(vocab_size=5), "drafts over 4 tokens, and .* has 5"),
    "other key heads": (unchanged, lambda: gemma(num_key_value_heads=4), r"sliding_attention it reads \(2, 8\)"),
    "the first layer": (
        unchanged,
        lambda: gemma(layer_types=FIRST_SLIDES),
        "none .* but the first keeps keys of sliding",
    ),
    "a missing tensor": (without_projection, lambda: assisted_target("own keys"), "missing_keys.*pre_projection"),
    "an unknown tensor": (further, lambda: assisted_target("own keys"), "unexpected_keys.*fusion"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    change, target, words = FAULTS[fault]
    made = layout("shared keys of gemma4")
    copied = Layout(made.config, dict(made.tensors), made.estimate, made.depth)
    change(copied)
    with pytest.raises(FsdError, match=words):
        load_drafter(str(copied.write(tmp_path)), target())


def test_an_adapter_beside_a_head_is_told(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model-Optimizer trains a LoRA of the target with a head, and exports both into one directory."""
    place = layout("p-eagle").write(tmp_path)
    (place / "adapter_config.json").write_text("{}")
    load_drafter(str(place), target(), TREE)
    assert "trained on the adapted target, and LlamaForCausalLM has no adapter" in caplog.text
    caplog.clear()
    monkeypatch.setattr(target().config, "merged_adapter", "0123", raising=False)
    load_drafter(str(place), target(), TREE)
    assert "adapter" not in caplog.text
