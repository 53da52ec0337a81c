"""How byte-level BPE vocabularies of GGUF files split text before the merges, by the name in ``tokenizer.ggml.pre``.

The patterns are those of the models' own tokenizers. llama.cpp (llama-vocab.cpp) lists the names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

Steps = Callable[[], list[Any]]


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split before BPE merges.

    Attributes:
        steps: returns the pre-tokenizers in order.
        nfc: whether text is normalised to NFC first.
        whole_words: whether a word that is a token skips the merges.
        begins: whether text begins with the BOS token if the file does not say.
    """

    steps: Steps
    nfc: bool = False
    whole_words: bool = False
    begins: bool = False


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"[^\r\n\p{L}\p{N}]?"  # what may stand before the letters of a word
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
)


def _splits(*patterns: str) -> Steps:
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return lambda: [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _words(digits: str) -> str:
    """Split text as GPT-4's tokenizer does, and numbers by the pattern ``digits``."""
    return rf"{_SHORT}|{_HEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(short: str, digits: str) -> str:
    """Split words before capitals, too."""
    return (
        rf"{_HEAD}{_UPPER}*{_LOWER}+{short}|{_HEAD}{_UPPER}+{_LOWER}*{short}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


def _as_gpt2(*before: Any) -> Steps:
    return lambda: [*before, pre_tokenizers.ByteLevel(add_prefix_space=False)]


def _falcon() -> list[Any]:
    digits = [
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
    return [pre_tokenizers.Punctuation("contiguous"), *_as_gpt2()(), *digits]


_THREE, _QWEN = _splits(_words(r"\p{N}{1,3}")), _splits(_words(r"\p{N}"))
_GPT4O = _splits(_cased(rf"{_SHORT}?", r"\p{N}{1,3}"))
_DEEPSEEK_V3 = _splits(r"\p{N}{1,3}", _CJK, rf"{_PUNCTUATED}|{_SPACES}")
_MARKS = _words(r"\p{N}").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_EAST = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_SHORT}|{_HEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"

_GPT2_NAMES = """
gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling
modern-bert
"""
_LLAMA_3_NAMES = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
_DIGIT_NAMES = "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"
_TABLE: list[tuple[str, PreTokenizer]] = [
    (_GPT2_NAMES, PreTokenizer(_as_gpt2())),
    (_DIGIT_NAMES, PreTokenizer(_as_gpt2(pre_tokenizers.Digits(individual_digits=True)))),
    (_LLAMA_3_NAMES, PreTokenizer(_THREE, whole_words=True, begins=True)),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer(_THREE)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez", PreTokenizer(_QWEN, nfc=True)),
    ("stablelm2 hunyuan solar-open grok-2", PreTokenizer(_QWEN)),
    ("qwen35", PreTokenizer(_splits(_MARKS), nfc=True)),
    ("tekken", PreTokenizer(_splits(_cased("", r"\p{N}")), whole_words=True, begins=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer(_GPT4O)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK_V3)),
    ("deepseek-coder", PreTokenizer(_splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, r"\p{N}"))),
    ("deepseek-llm", PreTokenizer(_splits(
        r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", "\\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _EAST, r"\p{N}"
    ))),
    ("falcon", PreTokenizer(_falcon)),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer(_splits(_BAILING))),
    ("seed-coder", PreTokenizer(_splits(_SEED))),
    ("bloom poro-chat gpt3-finnish", PreTokenizer(_splits(_BLOOM))),
    ("viking", PreTokenizer(_splits(_BLOOM, r"\p{N}"))),
    ("tiny_aya cohere2moe", PreTokenizer(_splits(r"\d{1,3}(?=(?:\d{3})*\b)", _cased(rf"{_SHORT}?", r"\p{N}{1,3}")))),
    ("minicpm5", PreTokenizer(_splits(r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True)),
]  # fmt: skip
PRE_TOKENIZERS = {name: pre for names, pre in _TABLE for name in names.split()}
