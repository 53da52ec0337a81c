"""Greedy exact decoding equals ``model.generate`` in fp32 on every family, alone and in ragged batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GitConfig, GitForCausalLM

from fsd_bench.planned import sizes_of
from fsd_core.errors import ModelLoadError
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.device.cache import cache_argument
from fsd_infer.drafters import NoDrafter
from fsd_infer.heads.mtp import find_mtp
from fsd_infer.targets.checks import check_directory
from fsd_infer.targets.kinds import auto_class
from tests import families
from tests.families import VOCAB, WINDOW, OracleDrafter, drafter_of, reference, tiny_head, tiny_model, tiny_prompts

# Whose layer stands alone, so that a head's is of that kind; a Llama layer otherwise.
OWN_LAYER = {"llama", "qwen2", "qwen3", "gemma2", "mistral", "phi3", "olmo2", "cohere", "stablelm", "granite"}

LIMITS: dict[str, Any] = dict(max_new_tokens=10, do_sample=False)


@pytest.mark.filterwarnings("error::FutureWarning")  # of transformers, about an argument of a forward
@pytest.mark.parametrize("device", ["cpu", families.CUDA])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_greedy_equals_generate(family: str, device: str) -> None:
    model = tiny_model(family).to(device)
    target = Target(model)
    prompts = tiny_prompts()
    expected = reference(model, prompts, **LIMITS)
    assert len({token for row in expected for token in row}) > 3, "degenerate model: the comparison would be hollow"
    for name, least_tau in {"none": 1.0, "reduced": 1.0, "oracle": 2.0}.items():
        decoder = FuzzyDecoder(target, drafter_of(name, target))
        if name == "oracle":
            assert decoder.generate(prompts[:1], **LIMITS).sequences == expected[:1], f"{name}, batch 1"
        batch = decoder.generate(prompts, **LIMITS)
        assert batch.sequences == expected, f"{name}, ragged batch"
        assert batch.stats.acceptance_length >= least_tau, f"{name}: drafts that are right were not accepted"
    layer = tiny_head(target).head.config.layer
    assert layer["model_type"] == (family if family in OWN_LAYER else "llama")


CASES: dict[str, dict[str, Any]] = {
    "three tokens": dict(name="head", shape=TreeShape(3, 10, 200), draft_vocab_size=3),
    "ids of the text": dict(name="head", shape=TreeShape(3, 4, 14), draft_vocab_size=20),
    "lm": dict(name="lm", shape=TreeShape(4, 3, 12)), "lm, stopped": dict(name="lm", shape=TreeShape.chain(5, 0.5)),
    "head+lookup, more": dict(name="reduced+lookup", nodes=20),
    "self+lookup": dict(name="self+lookup", shape=TreeShape.chain(3), nodes=8),
    "lm+lookup+recycle": dict(name="lm+lookup+recycle", shape=TreeShape(4, 3, 12), nodes=16),
}  # fmt: skip
NAMES = ["lookup", "memory", "recycle", "forgetful", "lookup+recycle", "fused", "reduced+lookup", "oracle+lookup"]
DRAFTERS = {**{name: {"name": name} for name in NAMES}, **CASES}
LEAST = {"lookup": 2.0, "memory": 2.0, "recycle": 2.0, "self+lookup": 3.0}  # tokens per forward under llama
WITH_MODELS = [name for name in DRAFTERS if not name.startswith(("lookup", "memory", "recycle", "forgetful"))]
WINDOWED = ["fused", "ids of the text", "lm", "oracle+lookup", "reduced+lookup"]  # also with windows and capped logits


@pytest.mark.parametrize(
    ("name", "family", "device"),
    [
        *((name, "llama", "cpu") for name in DRAFTERS), *((name, "gemma2", "cpu") for name in WINDOWED),
        *(pytest.param(name, "llama", "cuda", marks=pytest.mark.gpu) for name in DRAFTERS),
    ],
)  # fmt: skip
def test_whatever_drafts_greedy_answers_are_the_targets(name: str, family: str, device: str) -> None:
    """And under a rule that opens every gate they do not depend on the batch, where a row's tree does not."""
    circles = name in ("lookup", "memory") and family == "llama"
    target = Target((families.circling_model() if circles else tiny_model(family)).to(device))
    drafter = drafter_of(target=target, **DRAFTERS[name])
    decoder, prompts = FuzzyDecoder(target, drafter), [prompt + prompt[:4] for prompt in tiny_prompts()]
    limits = {**LIMITS, "max_new_tokens": 24 if circles else 14}
    expected = reference(target.model, prompts, **limits)
    learns = any(part in name for part in ("memory", "recycle", "forgetful"))
    for asked in (prompts[:1], prompts, prompts)[: 3 if learns else 2]:
        out = decoder.generate(asked, **limits)
        assert out.sequences == expected[: len(asked)]
    assert out.stats.acceptance_length >= LEAST.get(name, 1.0) or family != "llama"
    opened = decoder.generate(prompts, rule="fuzzy:js:inf", **limits)
    if name not in WITH_MODELS:
        assert opened.sequences == expected and opened.stats.divergence_spent == 0, "no q is known"
    if "head" in name or "reduced" in name or "ids" in name:
        alone = [decoder.generate([prompt], rule="fuzzy:js:inf", **limits).sequences[0] for prompt in prompts[:2]]
        assert opened.sequences[:2] == alone and opened.stats.gate_open_fraction > 0.15


def test_unsupported_layers_and_attention_are_refused() -> None:
    model = tiny_model("llama")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ModelLoadError, match="linear_attention"):
        Target(model)
    model = tiny_model("llama")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ModelLoadError, match='"sdpa" or "eager"'):
        Target(model)
    for window in (0, -1, 1):  # at 1, generate does not apply it to its cache
        with pytest.raises(ModelLoadError, match=f"sliding_window in the config of gemma2 is {window}, so"):
            Target(tiny_model("gemma2", sliding_window=window))
    with pytest.raises(ModelLoadError, match='is on the device "meta"'):
        FuzzyDecoder.from_pretrained(tiny_model("llama").to("meta"), "lookup")


def test_captured_layers_are_those_of_the_text() -> None:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    git = GitForCausalLM(GitConfig(vocab_size=VOCAB, vision_config=dict(sizes, image_size=8, patch_size=4), **sizes))
    assert Target(git).layers([0, 1]) == list(git.git.encoder.layer)


_HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64, sliding_window=WINDOW)
_INKLING: dict[str, Any] = dict(
    _HEADS, hidden_size=32, num_hidden_layers=2, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
)  # fmt: skip
_BYTES = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, intermediate_size=32)
_GLM: dict[str, Any] = dict(
    _HEADS, num_key_value_heads=4, vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, q_lora_rank=16,
    kv_lora_rank=16, qk_rope_head_dim=0, qk_nope_head_dim=8, v_head_dim=8, index_head_dim=16, index_n_heads=16,
    index_topk=8, index_kpool=4, layer_types=["full_attention"], pad_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mpt", dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=64)),
        ("rwkv", dict(hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)),
        ("gemma3n_text", dict(
            hidden_size=32, num_hidden_layers=2, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=0)),
        ("openai-gpt", dict(n_embd=32, n_layer=2, n_head=4)),
        ("gpt_neo", dict(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]])),
        ("falcon", dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)),
        ("bert", dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)),
        ("recurrent_gemma", dict(hidden_size=32, lru_width=32, num_hidden_layers=3, num_attention_heads=4)),
        ("glm5_next", {"text_config": _GLM, "vision_config": dict(depth=1, hidden_size=32, num_heads=4)}),
        ("inkling_text", _INKLING),
        ("inkling2_text", {**_INKLING, "unpadded_vocab_size": VOCAB}),
        ("blt", dict.fromkeys(("patcher_config", "encoder_config", "decoder_config", "global_config"), _BYTES)),
        ("dory", dict(hidden_size=32, num_hidden_layers=4, n_input_layers=1, n_output_layers=1, **_HEADS)),
    ],
)  # fmt: skip
def test_models_that_cannot_read_a_tree_are_refused(family: str, options: dict[str, Any]) -> None:
    """They would answer, with other tokens than alone."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    config = AutoConfig.for_model(family, vocab_size=VOCAB, **options)
    model = auto_class(config).from_config(config)
    with pytest.raises(ModelLoadError, match="[Uu]se another target"):
        FuzzyDecoder(Target(model), NoDrafter(VOCAB)).generate([[1, 2, 3]], max_new_tokens=2, do_sample=False)


def test_doge_is_refused_where_its_prompts_are_not_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.18, transformers left the mask of a whole prompt to sdpa, to which Doge always gives one of its own."""

    def made(attention: str) -> Any:
        options: dict[str, Any] = {**_HEADS, "sliding_window": None, "pad_token_id": 0, "eos_token_id": None}
        config = AutoConfig.for_model("doge", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, **options)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()

    monkeypatch.setattr("fsd_infer.targets.checks.VERSION", "5.17.1")
    with pytest.raises(ModelLoadError, match='Doge in both directions.*"eager", or install transformers 5.18'):
        Target(made("sdpa"))
    model, prompts = made("eager"), tiny_prompts()
    answers = FuzzyDecoder(Target(model), NoDrafter(VOCAB)).generate(prompts, max_new_tokens=9, do_sample=False)
    assert answers.sequences == reference(model, prompts, max_new_tokens=9)
    monkeypatch.setattr("fsd_infer.targets.checks.VERSION", "5.18.0.dev0")
    Target(made("sdpa"))


def test_heads_read_no_inner_streams() -> None:
    """HY-V4 has hyper-connections: four streams between its layers, and one after the last."""
    if "hy_v4" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no hy_v4")
    sizes = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1)
    index: dict[str, Any] = dict(index_head_dim=16, index_n_heads=16, index_topk=6)
    target, prompts = Target(tiny_model("hy_v4", num_key_value_heads=4, **sizes, **experts, **index)), tiny_prompts()
    answers = FuzzyDecoder(target, drafter_of("oracle", target)).generate(prompts, **LIMITS)
    assert answers.sequences == reference(target.model, prompts, **LIMITS)
    with pytest.raises(ModelLoadError, match="several streams"):
        FuzzyDecoder(target, drafter_of("fused", target)).generate(prompts, **LIMITS)


@pytest.mark.parametrize("family", ["bert", "rembert", "modernbert-decoder"])
def test_heads_share_no_lm_head_of_more_than_one_map(family: str) -> None:
    """RemBERT's first map widens, and ModernBERT calls the last one its decoder. Other drafters need no such head."""
    ends = {"bos_token_id": 1, "eos_token_id": 2} if family == "modernbert-decoder" else {}
    target = Target(tiny_model(family, is_decoder=True, output_embedding_size=48, **ends))
    with pytest.raises(ModelLoadError, match="does more than a linear map"):
        tiny_head(target, layout="eagle3")
    answers = FuzzyDecoder(target, drafter_of("oracle", target)).generate(tiny_prompts(), **LIMITS)
    assert answers.sequences == reference(target.model, tiny_prompts(), **LIMITS)


@pytest.mark.parametrize("layout", ["fsd", "eagle3"])
def test_a_new_heads_layer_has_the_sizes_of_the_first_where_layers_differ(layout: str) -> None:
    """Gemma-4's layers of full attention have wider heads and fewer keys."""
    sizes = dict(num_hidden_layers=6, head_dim=8, global_head_dim=16, num_global_key_value_heads=1)
    own: dict[str, Any] = dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, attention_k_eq_v=True)
    target, prompts = Target(tiny_model("gemma4_text", sliding_window=WINDOW, **sizes, **own)), tiny_prompts()
    head = tiny_head(target, layout=layout)
    layer, planned = head.head.config.layer, sizes_of(target)
    assert (layer["model_type"], layer["head_dim"], layer["num_key_value_heads"]) == ("llama", 8, 2)
    assert (planned.head_dim, planned.kv_heads, planned.intermediate_size) == (8, 2, 64)
    answers = FuzzyDecoder(target, head).generate(prompts, **LIMITS)
    assert answers.sequences == reference(target.model, prompts, **LIMITS)


@pytest.mark.parametrize(("family", "seen"), [("deepseek_v32", 6), ("glm_moe_dsa", 6), ("glm_moe_dsa", 64)])
def test_sparse_attention_chooses_among_what_a_tree_shows(family: str, seen: int) -> None:
    """Six tokens of longer texts, or all. GLM's last layer reads what the one before has chosen."""
    sizes = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1)
    index: dict[str, Any] = dict(index_head_dim=16, index_n_heads=16, index_topk=seen, index_topk_pattern="FFS")
    model = tiny_model(family, num_key_value_heads=4, num_hidden_layers=3, **sizes, **experts, **index)
    target, prompts = Target(model), tiny_prompts((7, 12, 3))
    expected = reference(model, prompts, **LIMITS)
    for drafter, least in (("oracle", 2.0), ("fused", 1.0)):
        out = FuzzyDecoder(target, drafter_of(drafter, target, TreeShape(3, 3, 8))).generate(prompts, **LIMITS)
        assert out.sequences == expected and out.stats.acceptance_length >= least


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_chunked_prefill_equals_whole(family: str, in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    monkeypatch.setattr(Target, "reads_in_turn", in_turn)
    target = Target(model)
    prompts = tiny_prompts((40, 23, 7))
    expected = reference(model, prompts)
    monkeypatch.setattr("fsd_infer.request.prompts.PREFILL_CHUNK", 16)
    decoder = FuzzyDecoder(target, OracleDrafter(target))
    assert decoder.generate(prompts, max_new_tokens=24, do_sample=False).sequences == expected
    assert decoder.generate(prompts[:1], max_new_tokens=24, do_sample=False).sequences == expected[:1]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_model_with_few_layers_is_not_taken_for_a_damaged_one(family: str, tmp_path: Path) -> None:
    """Qwen's max_window_layers is 28 if nothing is said, more than these models have tensors."""
    tiny_model(family, num_hidden_layers=1, max_window_layers=28).save_pretrained(tmp_path)
    check_directory(tmp_path)


def test_layers_that_the_config_does_not_count_are_no_mtp_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They were taken for such and left out without a word."""
    tiny_model("llama", num_hidden_layers=3).save_pretrained(tmp_path / "whole")
    cut = families.altered(tmp_path / "whole", tmp_path / "cut", {"num_hidden_layers": 2})
    target = Target.from_pretrained(str(cut))
    assert "9 tensors of" in caplog.text and "'model.layers.2." in caplog.text
    assert find_mtp(target) is None


def test_context_is_used_to_its_last_position() -> None:
    """Learned positions end with the context. Trees that reach beyond must not crash or change tokens."""
    model = tiny_model("gpt2", max_position_embeddings=32, n_positions=32)
    target = Target(model)
    prompt = tiny_prompts((10,))[0]
    out = FuzzyDecoder(target, OracleDrafter(target)).generate([prompt], max_new_tokens=22, do_sample=False)
    assert out.sequences == reference(model, [prompt], max_new_tokens=22)
    longer = FuzzyDecoder(target, NoDrafter(VOCAB)).generate([prompt], max_new_tokens=500, do_sample=False)
    assert longer.sequences == out.sequences
    assert longer.stats.rows[0].finish_reason == "length"


def test_a_model_that_keeps_more_layers_than_it_has_is_refused() -> None:
    """As a family may whose layers run several times over a text, each time with a copy of a layer's cache."""
    target = Target(tiny_model("llama"))

    def grow(module: Any, args: Any, given: dict[str, Any]) -> None:
        cache = given[cache_argument(type(module))]
        cache.layers.append(cache.layers[0])

    target.model.register_forward_pre_hook(grow, with_kwargs=True)
    with pytest.raises(ModelLoadError, match="keeps 3 layers of keys and values, but has 2 layers"):
        FuzzyDecoder(target, NoDrafter(VOCAB)).generate([[1, 2, 3]], max_new_tokens=2, do_sample=False)
