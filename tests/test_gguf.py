"""GGUF files: the model that a file was made from, by architecture, and its tokenizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from benchmarks import write_gguf as writer
from fsd_core.errors import ModelLoadError
from fsd_infer import FuzzyDecoder
from fsd_infer.targets.gguf import expand_gguf
from fsd_infer.targets.loading import load_config, load_target
from tests.families import tiny_model
from tests.gguf_toys import FITTING, TOKENS, family_model, stablelm, tiny_llama, write_gguf
from tests.text_toys import tiny_tokenizer


@pytest.mark.parametrize("tied", [True, False])
def test_expansion_gives_the_model_the_gguf_was_made_from(tmp_path: Path, tied: bool) -> None:
    original = tiny_llama(tied)
    expand_gguf(write_gguf(tmp_path / "tiny.gguf", original), tmp_path)
    model, tokenizer = load_target(tmp_path, dtype="fp32", device="cpu")
    expected = original.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    ids = torch.randint(3, len(TOKENS), (1, 40))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits)
    assert model.config.max_position_embeddings == 256
    assert model.generation_config.eos_token_id == [2, 0]

    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert asked == "<|im_start|>hi<|im_end|>"
    # a byte-level step alone would cut the two line breaks apart, because the second may go with the digit
    assert tokenizer.tokenize("the\n\n12") == ["th", "e", "ĊĊ", "1", "2"]
    assert tokenizer("<|im_end|> th")["input_ids"] == [2, TOKENS.index("Ġth")]
    text = "  naïve  你好\t x = 10\n\n1. the 'end'  "
    assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text


def test_expansion_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"not a model at all" * 10)
    with pytest.raises(ModelLoadError, match="garbage.gguf is not a readable GGUF file"):
        expand_gguf(garbage, tmp_path)
    with pytest.raises(ModelLoadError, match="architecture 'stablelm'. Only llama, qwen2, qwen3"):
        expand_gguf(write_gguf(tmp_path / "q.gguf", tiny_llama(), arch="stablelm"), tmp_path)
    with pytest.raises(ModelLoadError, match="'t5' vocabulary. Only gpt2 and llama"):
        expand_gguf(write_gguf(tmp_path / "p.gguf", tiny_llama(), facts={"tokenizer_model": "t5"}), tmp_path)


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}


@pytest.mark.parametrize(("family", "rope"), [("qwen2", None), ("qwen3", None), ("llama", LLAMA_3)])
def test_families_give_the_model_the_file_was_made_from(tmp_path: Path, family: str, rope: Any) -> None:
    options: dict[str, Any] = {"vocab_size": len(TOKENS)}
    if rope is not None:
        options["rope_parameters"] = rope
    original = family_model(family, **options)
    facts: dict[str, Any] = {"key_length": original.model.layers[0].self_attn.head_dim}
    factors = None
    if rope is LLAMA_3:
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        base = type(original.model.rotary_emb)(tiny_model("llama", rope_parameters=plain).config).inv_freq
        factors = base / ROPE_INIT_FUNCTIONS["llama3"](original.config, "cpu")[0]
    path = write_gguf(tmp_path / "tiny.gguf", original, family, facts=facts, factors=factors)
    model, tokenizer = load_target(path, dtype="fp32", device="cpu")
    ids = torch.randint(3, len(TOKENS), (1, 40))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)
    assert type(model) is type(original) and load_config(str(path)).model_type == family
    assert tokenizer is not None and tokenizer.eos_token_id == 2
    if factors is not None:
        write_gguf(path, original, family, facts=facts, factors=factors.flip(0))
        with pytest.raises(ModelLoadError, match="rotary factors that are not Llama 3's"):
            load_target(path, device="cpu")


def test_the_parts_of_a_file_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gguf_toys.GGUFWriter", partial(GGUFWriter, split_max_tensors=8))
    original = tiny_llama()
    write_gguf(tmp_path / "tiny.gguf", original)
    stablelm(tmp_path, {})
    parts = sorted(tmp_path.glob("tiny-*"))
    assert len(parts) == 3
    for part in parts:
        model, tokenizer = load_target(part, dtype="fp32", device="cpu")
        assert all(torch.equal(value, original.state_dict()[name]) for name, value in model.state_dict().items())
        assert tokenizer is not None and len(tokenizer) == len(TOKENS)
    with pytest.raises(ModelLoadError, match="stablelm-00001-of-0000.* Merge them with llama-gguf-split first"):
        load_target(next(iter(sorted(tmp_path.glob("stablelm-*")))), device="cpu")
    parts[1].unlink()
    with pytest.raises(ModelLoadError, match="one of 3 parts, and 1 are missing, first tiny-00002-of-00003.gguf"):
        load_target(parts[0], device="cpu")


def test_other_architectures_are_read_by_transformers(tmp_path: Path) -> None:
    path, original = stablelm(tmp_path, {"eos_token_id": 0, "eot_token_id": 2})
    model, _ = load_target(path, dtype="fp32", device="cpu")
    assert model.generation_config.eos_token_id == [0, 2]
    assert load_config(str(path)).model_type == model.config.model_type == "stablelm"
    ids = torch.randint(3, len(TOKENS), (1, 20))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-3, atol=1e-3)
    decoder = FuzzyDecoder.from_pretrained(str(path), "none", device="cpu")
    assert len(decoder.generate([[7, 8, 9]], max_new_tokens=3, do_sample=False).sequences[0]) == 3
    assert decoder.target.precision == "" and decoder.load_drafter("self:bits=4").name == "lm"
    with pytest.raises(ModelLoadError, match="transformers cannot read this GGUF file"):
        load_target(write_gguf(tmp_path / "other.gguf", tiny_llama(), "rwkv9"), device="cpu")


SPLITS = {  # of TEXT, in bytes' letters; made by hand from the models' tokenizer.json
    "gpt-2": "the|Ċ|Ċ|1234|ĠI|'m|ĠDON|'|T|ĠaB",
    "command-r": "the|ĊĊ|1|2|3|4|ĠI|'m|ĠDON|'|T|ĠaB",
    "qwen2": "the|ĊĊ|1|2|3|4|ĠI|'m|ĠDON|'T|ĠaB",
    "llama-bpe": "the|ĊĊ|123|4|ĠI|'m|ĠDON|'T|ĠaB",
    "tekken": "the|ĊĊ|1|2|3|4|ĠI|'m|ĠDON|'T|Ġa|B",
    "gpt-4o": "the|ĊĊ|123|4|ĠI'm|ĠDON'T|Ġa|B",
    "deepseek-v3": "the|ĊĊ|123|4|ĠI|'m|ĠDON|'T|ĠaB",
    "deepseek-coder": "the|Ċ|Ċ|1|2|3|4|ĠI|'|m|ĠDON|'|T|ĠaB",
    "falcon": "the|Ċ|Ċ|123|4|ĠI|'|m|ĠDON|'|T|ĠaB",
    "tiny_aya": "the|ĊĊ|1|234|ĠI'm|ĠDON'T|Ġa|B",
}


@pytest.mark.parametrize("pre", SPLITS)
def test_pre_tokenizers_of_a_file(tmp_path: Path, pre: str) -> None:
    tokenizer: Any = load_target(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), pre=pre), device="cpu")[1]
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("the\n\n1234 I'm DON'T aB")
    assert "|".join(piece for piece, _ in pieces) == SPLITS[pre]
    bos = [1] if pre in ("llama-bpe", "tekken") else []
    assert tokenizer("th<|im_end|>")["input_ids"] == [*bos, TOKENS.index("th"), 2]
    composed = tokenizer.decode(tokenizer("e\u0301")["input_ids"], skip_special_tokens=True)
    assert composed == ("\u00e9" if pre == "qwen2" else "e\u0301")


def test_a_tokenizer_that_may_be_another_is_told(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), pre="kimi-k9")
    with pytest.warns(UserWarning, match="tiny.gguf: its pre-tokenizer 'kimi-k9' is not known here"):
        load_target(path, device="cpu")
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="tokenizer.json is not the tokenizer of tiny.gguf: .* Put one of them"):
        load_target(path, device="cpu")


def test_types_that_are_not_expanded_are_refused_with_the_files_name(tmp_path: Path) -> None:
    def doubles(name: str, rows: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        return rows.astype(np.float64), GGMLQuantizationType.F64

    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), quantized=doubles)
    for load in (load_target, lambda path, device: expand_gguf(path, tmp_path)):
        with pytest.raises(ModelLoadError, match="tiny.gguf: .*F64 .* Use another file"):
            load(path, device="cpu")


def test_a_checkpoint_is_written_as_a_file(tmp_path: Path) -> None:
    original = tiny_llama(**FITTING)
    original.save_pretrained(tmp_path / "plain")
    tokenizer = load_target(write_gguf(tmp_path / "other.gguf", tiny_llama()), device="cpu")[1]
    tokenizer.save_pretrained(tmp_path / "plain")
    assert writer.main([str(tmp_path / "plain"), str(tmp_path / "made"), "--kind", "Q8_0"]) == 0
    model, its = load_target(tmp_path / "made" / "model.gguf", dtype="fp32", device="cpu")
    assert its is not None and its.get_vocab() == tokenizer.get_vocab()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, original.state_dict()[name], atol=0.01, rtol=0.01)
