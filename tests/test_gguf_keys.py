"""GGUF files as llama.cpp reads them: each key is used, harmless, or refused by name; headers must be whole."""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, Keys, RopeScalingType
from transformers import AutoConfig, AutoTokenizer

from benchmarks.write_gguf import finish
from fsd_core.errors import FsdError, ModelLoadError
from fsd_infer import FuzzyDecoder
from fsd_infer.targets import gguf_foreign, gguf_keys
from fsd_infer.targets.gguf import expand_gguf
from fsd_infer.targets.gguf_file import read_gguf
from fsd_infer.targets.gguf_keys import end_ids
from fsd_infer.targets.gguf_tokenizer import load_gguf_tokenizer
from fsd_infer.targets.loading import load_target
from tests.families import tiny_model
from tests.gguf_toys import CONTROL, TOKENS, family_model, stablelm, tiny_llama, write_gguf

LLAMA, TOK = "llama.", "tokenizer.ggml."


def loaded(path: Path) -> Any:
    return load_target(path, dtype="fp32", device="cpu")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 60)[None]).logits


# End of an answer ----------------------------------------------------------------------------------------------------

ENDS: list[tuple[dict[str, Any], Any]] = [  # the vocabulary has <|endoftext|> (0) and <|im_end|> (2)
    ({"eos_token_id": 0, "eot_token_id": 2}, [0, 2]),
    ({"eos_token_id": 0, "eot_token_id": 2, "eom_token_id": 1}, [0, 2, 1]),
    ({"eos_token_id": 0}, [0, 2]),  # a file of earlier days
    ({"eos_token_id": 0, "eot_token_id": 0}, [0, 2]),
    ({"eos_token_id": None}, [2, 0]),
    ({"eos_token_id": 2, f"{TOK}fim_rep_token_id": 5}, [2, 5, 0]),
    ({"eos_token_id": 2}, [2, 0]),
]
TEXTS: list[tuple[list[str], dict[str, int], list[int]]] = [
    (["a", "</s>", "<eos>", "<turn|>"], {"eos": 1}, [1, 2, 3]),
    (["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "b"], {"eos": 0, "eot": 2}, [0, 2, 1]),
    (["<PAD>", "<fim_pad>", "<reponame>", "<|file_sep|>", "c"], {"eos": 4}, [4, 1, 2, 3]),
    (["<fim_pad>", "c", "d"], {"eos": 2, "fim_pad": 1}, [2, 1]),
    (["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"], {"eos": 1}, [1, 2, 3]),  # gpt-oss
    (["<|end|>", "<|flush|>", "<|calls|>"], {"eos": 0}, [1, 2]),
    (["<|end|>", "<|return|>", "<|endoftext|>"], {"eos": 2}, [2, 0, 1]),
    (["</s>", "<|tool_response>", "<eos>"], {"eos": 2}, [2, 1]),
    (["x", "y"], {}, []),
]


@pytest.mark.parametrize(("tokens", "named", "right"), TEXTS)
def test_ends_are_found_by_text_as_llama_cpp_finds_them(
    tokens: list[str], named: dict[str, int], right: list[int]
) -> None:
    keys = {f"{TOK}{role}_token_id": index for role, index in named.items()}
    assert end_ids({f"{TOK}tokens": tokens, **keys}) == right


@pytest.mark.parametrize(("facts", "right"), ENDS)
def test_every_end_that_a_file_names_ends_an_answer(tmp_path: Path, facts: dict[str, Any], right: Any) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), facts=facts)
    model, tokenizer = loaded(path)
    assert model.generation_config.eos_token_id == right == model.config.eos_token_id
    expand_gguf(path, tmp_path)
    assert loaded(tmp_path)[0].generation_config.eos_token_id == right
    decoder = FuzzyDecoder.from_pretrained(model, "none", tokenizer)
    favoured = right[-1] if isinstance(right, list) else right
    answer = decoder.generate([[7, 8]], max_new_tokens=5, do_sample=False, sequence_bias={(favoured,): 100.0})
    assert answer.sequences[0] == [favoured] and answer.texts == [""]


# Rotary scaling ------------------------------------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 5000.0}
PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
SCALINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({f"{LLAMA}rope.scale_linear": 4.0}, LINEAR),
    ({"rope_scaling_factor": 4.0}, LINEAR),
    ({"rope_scaling_type": RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}, LINEAR),
    ({f"{LLAMA}rope.scale_linear": 2.0, "rope_scaling_factor": 4.0}, LINEAR),
    ({"rope_scaling_type": RopeScalingType.NONE, "rope_scaling_factor": 4.0}, PLAIN),
    ({"rope_scaling_factor": 0.0}, PLAIN),
    ({"rope_scaling_type": RopeScalingType.YARN}, PLAIN),
    ({"rope_scaling_type": RopeScalingType.YARN, f"{LLAMA}rope.scale_linear": 4.0}, YARN),
    ({"rope_scaling_type": RopeScalingType.YARN, "rope_scaling_factor": 4.0, "rope_scaling_attn_factors": 1.5},
     {**YARN, "attention_factor": 1.5 * (0.1 * float(np.log(4)) + 1)}),
    ({"rope_scaling_type": RopeScalingType.YARN, "rope_scaling_factor": 4.0, "rope_scaling_orig_ctx_len": 64,
      f"{LLAMA}rope.scaling.yarn_beta_fast": 16.0, f"{LLAMA}rope.scaling.yarn_beta_slow": 2.0},
     {**YARN, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0}),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "rope"), SCALINGS)
def test_rotary_scaling_in_every_form(tmp_path: Path, facts: dict[str, Any], rope: dict[str, Any]) -> None:
    original = family_model("llama", vocab_size=len(TOKENS), rope_parameters=rope)
    model, _ = loaded(write_gguf(tmp_path / "tiny.gguf", original, facts=facts))
    torch.testing.assert_close(logits(model), logits(original), rtol=1e-4, atol=1e-4)
    other = family_model("llama", vocab_size=len(TOKENS), rope_parameters=PLAIN if rope is not PLAIN else LINEAR)
    assert float((logits(other) - logits(original)).abs().max()) > 0.01


# Keys ----------------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({f"{LLAMA}{name}": value}, f"llama.{name}") for name, value in {
        "expert_used_count": 2, "attention.causal": False, "attention.clamp_kqv": 8.0,
        "attention.sliding_window": 64, "attention.max_alibi_bias": 8.0, "pooling_type": 1, "logit_scale": 0.5,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.scale": 0.2, "residual_scale": 0.5,
        "rope.scaling.alpha": 2.0, "rope.scaling.yarn_ext_factor": 0.5, "rope.dimension_sections": [1, 1, 2, 0],
        "nextn_predict_layers": 1, "embedding_length_out": 16, "use_parallel_residual": True, "ssm.state_size": 16,
        "attention.value_scale": 2.0, "hidden_activation": "gelu",
    }.items()),
    *(({f"{LLAMA}{name}": value}, words) for name, value, words in (
        ("rope.dimension_count", 4, "rope.dimension_count is 4, but keys have 8 dimensions"),
        ("attention.value_length", 4, "attention.value_length is 4"),
        ("rope.scaling.attn_factor", 1.5, "attn_factor 1.5 without YaRN"),
        ("rope.scaling.type", "longrope", "rope.scaling.type 'longrope'"),
        ("rope.scale_linear", float("inf"), "rope.scaling.factor is inf"),
        ("rope.scale_linear", -2.0, "rope.scaling.factor is -2"),
    )),
    ({"layer_norm_rms_eps": float("inf")}, "layer_norm_rms_epsilon is inf"),
    ({"layer_norm_rms_eps": float("nan")}, "layer_norm_rms_epsilon is nan"),
    ({"layer_norm_rms_eps": 3.0}, "layer_norm_rms_epsilon is 3.0"),
    ({"layer_norm_rms_eps": 0.0}, "layer_norm_rms_epsilon is 0.0"),
    ({"context_length": 0}, "context_length is 0"),
    ({"context_length": 2**32 - 1}, "context_length is 4294967295"),
    ({"rope_freq_base": float("inf")}, "rope.freq_base is inf"),
    ({"rope_freq_base": -1.0}, "rope.freq_base is -1.0"),
    ({"head_count": 3}, "dimensions"),
    ({"head_count_kv": 3}, "4 heads of 8 dimensions for 3 heads of keys"),
    ({"head_count": [4, 2]}, "the same in all layers"),
    ({"block_count": 0}, "block_count is 0"),
    ({"block_count": 10**6}, "layers, but"),
    ({"embedding_length": None}, "embedding_length is missing"),
    ({"eot_token_id": 10**6}, "eot_token_id is 1000000, which is not a token"),
    ({"bos_token_id": len(TOKENS)}, "bos_token_id is"),
    ({"token_list": [*TOKENS, "more"], "token_types": [1] * (len(TOKENS) + 1)}, "tokens, but"),
    ({"token_list": TOKENS[:-1]}, "tokens, but"),
    ({"token_list": [*TOKENS[:-1], TOKENS[5]]}, "is there twice"),
    ({"token_types": [1] * 5}, "token_type has fewer entries"),
    ({"token_merges": None}, "merges"),
    ({"general.type": "adapter"}, "general.type, 'adapter'"),
    ({f"{TOK}add_sep_token": True}, "add_sep_token"),
    ({"split.count": 3}, "one of 3 parts"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "words"), REFUSED, ids=lambda value: str(value)[:50])
def test_keys_that_change_the_computation_are_refused_by_name(
    tmp_path: Path, facts: dict[str, Any], words: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), facts=facts)
    with pytest.raises(ModelLoadError) as caught:
        loaded(path)
    assert words in str(caught.value) and "tiny.gguf" in str(caught.value)


@pytest.mark.parametrize("architecture", ["eagle3", "dflash", "gemma4-assistant"])
def test_draft_heads_in_such_files_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(ModelLoadError, match="tiny.gguf is a draft head, and those are not read from GGUF files"):
        loaded(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), architecture))


@pytest.mark.parametrize("architecture", ["llama", "stablelm", "glm4moe", "deepseek2"])
def test_mtp_layers_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    """By the key, by the tensors, or by both; in files that are read here, by transformers, or by none."""
    model = tiny_llama()
    for key, tensor in ((True, True), (True, False), (False, True)):
        path = tmp_path / "tiny.gguf"
        facts = {f"{architecture}.nextn_predict_layers": 1} if key else {}
        write_gguf(path, model, architecture, facts=facts, more={"blk.1.nextn.eh_proj.weight": 32} if tensor else {})
        with pytest.raises(ModelLoadError, match=r"tiny.gguf holds MTP layers.*safetensors") as caught:
            loaded(path)
        assert ("blk.1" in str(caught.value)) == tensor


def test_keys_that_change_nothing_load_in_silence_and_others_are_named(tmp_path: Path) -> None:
    neutral = {
        "expert_count": 0, "attention.causal": True, "attention.sliding_window": 256, "attention.clamp_kqv": 0.0,
        "rope.dimension_count": 8, "attention.value_length": 8, "rope.scaling.attn_factor": 1.0, "logit_scale": 1.0,
        "rope.scaling.finetuned": False, "tensor_data_layout": "Meta AI original pth", "embedding_length_out": 32,
    }  # fmt: skip
    facts = {**{LLAMA + name: value for name, value in neutral.items()}, "head_count": [4, 4], "general.type": "model"}
    facts |= {f"{TOK}mask_token_id": 3, "general.license": "mit", "quantize.imatrix.file": "x", "split.count": 1}
    original = tiny_llama()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = loaded(write_gguf(tmp_path / "tiny.gguf", original, facts=facts))
    torch.testing.assert_close(logits(model), logits(original))
    strange = {f"{LLAMA}new.thing": 1, "general.sampling.temp": 0.5, f"{TOK}more": "x", "clip.vision.x": 1}
    path = write_gguf(tmp_path / "tiny.gguf", original, facts=strange)
    with pytest.warns(UserWarning, match="read by nothing: clip.vision.x, general.sampling.temp, llama.new.thing, tok"):
        loaded(path)


def test_every_key_of_an_architecture_is_read_harmless_or_refused() -> None:
    """As gguf-py, a part of llama.cpp, lists them."""

    def names(listed: type) -> Iterator[str]:
        for value in vars(listed).values():
            yield from names(value) if isinstance(value, type) else [value] if isinstance(value, str) else []

    found = {name.removeprefix("{arch}.") for name in names(Keys) if name.startswith("{arch}.")}
    found -= {"{dense}_feat_in", "{dense}_feat_out"}
    assert len(found) > 100 and not found - (gguf_keys._READ | gguf_keys._HARMLESS | gguf_keys._NEUTRAL.keys())


def test_keys_that_transformers_leaves_out_are_refused(tmp_path: Path) -> None:
    for key, value in (("rope.scaling.factor", 4.0), ("attention.clamp_kqv", 3.0), ("final_logit_softcapping", 30.0),
                       ("rope.freq_base", 5000.0), ("rope.dimension_count", 8)):  # fmt: skip
        path, _ = stablelm(tmp_path, {f"stablelm.{key}": value})
        with pytest.raises(ModelLoadError, match=f"transformers' reader leaves out stablelm.{key} = {value}"):
            loaded(path)
    agreed = {"rope.scaling.factor": 1.0, "expert_count": 0, "rope.freq_base": 1e4, "rope.dimension_count": 2, "new": 1}
    path, original = stablelm(tmp_path, {f"stablelm.{key}": value for key, value in agreed.items()})
    with pytest.warns(UserWarning, match="read by nothing: stablelm.new."):
        loaded(path)
    torch.testing.assert_close(logits(loaded(path)[0]), logits(original), rtol=1e-3, atol=1e-3)
    its = {"general.architecture": "nemotron", "nemotron.attention.layer_norm_epsilon": 0.1}  # the reader takes RMS's
    with pytest.raises(ModelLoadError, match="nemotron.attention.layer_norm_epsilon = 0.1"):
        gguf_keys.check_foreign_keys(its, AutoConfig.for_model("nemotron"), {}, "x.gguf")


@pytest.mark.parametrize(("facts", "more", "words"), [
    ({}, {"rope_factors_long.weight": 4}, "'rope_factors_long.weight' has no place in a StableLmForCausalLM"),
    ({"block_count": 3}, {}, "lacks 11 tensors of its model, first 'model.layers.2"),
    ({"block_count": 10**6}, {}, "1000000 layers, but"),
    ({"feed_forward_length": 32}, {}, "has shape [32, 64], but its model needs [32, 32]"),
    ({"context_length": 0}, {}, "max_position_embeddings is 0"),
])  # fmt: skip
def test_what_transformers_would_drop_or_draw_at_random_is_refused(
    tmp_path: Path, facts: dict[str, Any], more: dict[str, int], words: str
) -> None:
    with pytest.raises(FsdError, match=re.escape(words)):
        loaded(stablelm(tmp_path, facts, more)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_falcon_files_repeat_the_embeddings_in_another_type(tied: bool) -> None:
    """The reader ties the two tables only if they are equal, whatever the config says."""
    model = tiny_model("falcon")
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    stored: dict[str, Any] = {f"{number}": value for number, value in enumerate(model.parameters())}
    table = {"output.weight": model.lm_head.weight} if tied else {}
    assert not gguf_foreign._unread(Path("x.gguf"), model, {**stored, **table}, "falcon")
    lost = {"token_embd.weight": model.lm_head.weight}
    with pytest.raises(ModelLoadError, match="its tensors hold .* numbers, and its model"):
        gguf_foreign._unread(Path("x.gguf"), model, lost, "falcon")


# Tokenizers ----------------------------------------------------------------------------------------------------------

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["\u2581", "t", "w", "o", "s", "\u2581t", "tw", "wo", "\u2581two", "two", "\u2581\u2581", "\u2581\u2581\u2581"]


def sentencepiece(path: Path, **facts: Any) -> Any:
    tokens = [*PIECES, *WORDS]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(WORDS)]
    scores = [0.0] * len(PIECES) + [-float(number) for number in range(len(WORDS))]
    vocabulary = {"tokenizer_model": "llama", "token_list": tokens, "token_types": kinds, "token_scores": scores}
    vocabulary |= {"token_merges": None, "tokenizer_pre": None, "eos_token_id": 2, "unk_token_id": 0}
    model = tiny_llama(vocab_size=len(tokens))
    return load_gguf_tokenizer(write_gguf(path / "spm.gguf", model, facts={**vocabulary, **facts}))


def test_sentencepiece_puts_a_space_before_each_text(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)

    def pieces(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])

    assert pieces("  two") == ["<s>", "\u2581\u2581", "\u2581two"]
    assert pieces("two") == ["<s>", "\u2581two"] and pieces(" two") == ["<s>", "\u2581", "\u2581two"]
    assert pieces("two</s> t\u00e9") == ["<s>", "\u2581two", "</s>", "\u2581", "\u2581t", "<0xC3>", "<0xA9>"]
    for text in ("  two", "two", " two  two", "t\u00e9 "):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    bare = sentencepiece(tmp_path, **{f"{TOK}add_space_prefix": False, "add_bos_token": False, "add_eos_token": True})
    assert bare.convert_ids_to_tokens(bare("  two")["input_ids"]) == ["\u2581", "\u2581two", "</s>"]
    assert bare.decode(bare(" two")["input_ids"], skip_special_tokens=True) == " two"


def test_tokens_and_templates_of_a_file(tmp_path: Path) -> None:
    facts = {"token_types": [1] * len(TOKENS), "token_list": ["", *TOKENS[1:]]}
    facts |= {"tokenizer.chat_template.tool_use": "tools", "eos_token_id": 2}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), facts=facts)
    tokenizer = loaded(path)[1]
    assert tokenizer.get_vocab()["[EMPTY_0]"] == 0
    assert tokenizer("<|im_end|>")["input_ids"] == [2], "the end of a turn is special whatever its type says"
    assert tokenizer.decode([2], skip_special_tokens=True) == ""
    asked: Any = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.get_chat_template(tools=[{"name": "x"}]) == "tools"
    (tmp_path / "out").mkdir()
    expand_gguf(path, tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.get_chat_template(tools=[{"name": "x"}]) == "tools" and len(CONTROL) == 3


# Headers -------------------------------------------------------------------------------------------------------------


def header(*tensors: tuple[str, int], keys: tuple[str, ...] = (), alignment: int = 32) -> bytes:
    """A file of fp32 tensors of 8 numbers each, by name and offset."""

    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    pairs = [("general.alignment", alignment), *((key, 1) for key in keys)]
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(pairs))]
    parts += [text(key) + struct.pack("<II", 4, value) for key, value in pairs]
    parts += [text(name) + struct.pack("<IQIQ", 1, 8, 0, at) for name, at in tensors]
    head = b"".join(parts)
    return head + bytes(-len(head) % 32) + bytes(range(128))


WHOLE: list[tuple[bytes, str | None]] = [
    (header(("a", 0), ("b", 32)), None), (header(("b", 32), ("a", 0)), None),
    (header(("a", 0), ("b", 0)), "'b' lies at 0, inside 'a' or not"),
    (header(("a", 0), ("b", 16)), "'b' lies at 16"),
    (header(("a", 8)), "not at a multiple of 32"),
    (header(("a", 0), ("a", 32)), "tensor 'a' is there twice"),
    (header(("a", 0), keys=("x", "x")), "key 'x' is empty or there twice"),
    (header(("a", 0), keys=("",)), "is empty"),
    (header(("a", 0), alignment=24), "alignment 24"),
    (header(("a", 0), alignment=0), "alignment 0"),
    (b"GGUF\0\0\0\3" + bytes(100), "its numbers are big-endian"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "words"), WHOLE)
def test_headers_must_be_whole(tmp_path: Path, data: bytes, words: str | None) -> None:
    path = tmp_path / "made.gguf"
    path.write_bytes(data)
    if words is None:
        tensors = read_gguf(path)[1]
        assert [bytes(tensors[name].data)[0] for name in ("a", "b")] == [0, 32]
        return
    with pytest.raises(ModelLoadError, match="not a readable GGUF file") as caught:
        read_gguf(path)
    assert words in str(caught.value)


def test_five_dimensions_are_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "five.gguf", "llama")
    writer.add_tensor("a", np.zeros((1, 1, 1, 1, 8), np.float32))
    finish(writer)
    with pytest.raises(ModelLoadError, match="5 dimensions"):
        read_gguf(tmp_path / "five.gguf")
