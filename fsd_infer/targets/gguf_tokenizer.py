"""Build the tokenizers of GGUF files.

This module builds byte-level BPE vocabularies with a pre-tokenizer in :data:`PRE_TOKENIZERS`, and transformers converts
the others. Its converter lacks some pre-tokenizers. SmolLM2's, for example, splits digits before the byte-level step,
which changes the ids of numbered lists.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fsd_infer.errors import ModelLoadError
from fsd_infer.files import write_json
from fsd_infer.targets.gguf_file import read_gguf

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split before BPE merges.

    Attributes:
        steps: returns the pre-tokenizers in order.
        nfc: whether text is normalised to NFC first.
        whole_words: whether a word that is a token skips the merges.
        begins: whether text begins with the BOS token if the file does not say.
    """

    steps: Callable[[], list[Any]]
    nfc: bool = False
    whole_words: bool = False
    begins: bool = False


def _words(digits: str) -> Callable[[], list[Any]]:
    """Split text as GPT-4's tokenizer does, and numbers by the pattern ``digits``."""
    contraction = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    pattern = (
        rf"{contraction}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return lambda: [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _smollm() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]


PRE_TOKENIZERS = {
    "smollm": PreTokenizer(_smollm),
    "qwen2": PreTokenizer(_words(r"\p{N}"), nfc=True),
    "llama-bpe": PreTokenizer(_words(r"\p{N}{1,3}"), whole_words=True, begins=True),
}


def load_gguf_tokenizer(source: Path, facts: dict[str, Any] | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer in the directory of ``source``, or, if there is none, build the file's own.

    Args:
        source: a GGUF file.
        facts: metadata of the file, if already read.
    """
    if any((source.parent / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return AutoTokenizer.from_pretrained(source.parent)
    facts = read_gguf(source)[0] if facts is None else facts
    if _pre_tokenizer(facts) is None:
        return AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(facts, Path(folder), source)
        return AutoTokenizer.from_pretrained(folder)


def write_tokenizer(facts: dict[str, Any], out_dir: Path, source: Path) -> None:
    """Write tokenizer.json, its configuration and the chat template.

    Args:
        facts: metadata of the GGUF file.
        out_dir: an existing directory.
        source: the file's name for errors.

    Raises:
        ModelLoadError: an unknown vocabulary or pre-tokenizer.
    """
    pre = _pre_tokenizer(facts)
    if pre is None:
        raise ModelLoadError(
            f"{source} has a {facts.get('tokenizer.ggml.model')!r} vocabulary with pre-tokenizer "
            f"{facts.get('tokenizer.ggml.pre')!r}. Only gpt2 with {', '.join(PRE_TOKENIZERS)} is known."
        )
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    _tokenizer(facts, tokens, pre).save(str(out_dir / "tokenizer.json"))
    special = {role: _named(facts, tokens, key) for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"))}
    special["pad"] = _named(facts, tokens, "padding") or special["eos"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(facts[f"{facts['general.architecture']}.context_length"]),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **{f"{role}_token": token for role, token in special.items() if token is not None},
    }
    template = facts.get("tokenizer.chat_template")
    if template:
        # in both places, because readers differ
        settings["chat_template"] = template
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(out_dir / "tokenizer_config.json", settings, indent=2)


def _pre_tokenizer(facts: dict[str, Any]) -> PreTokenizer | None:
    gpt2 = facts.get("tokenizer.ggml.model") == "gpt2"
    return PRE_TOKENIZERS.get(str(facts.get("tokenizer.ggml.pre"))) if gpt2 else None


def _named(facts: dict[str, Any], tokens: list[str], role: str) -> str | None:
    index = facts.get(f"tokenizer.ggml.{role}_token_id")
    return None if index is None else tokens[index]


def _tokenizer(facts: dict[str, Any], tokens: list[str], pre: PreTokenizer) -> Tokenizer:
    merges = [tuple(pair.split(" ", 1)) for pair in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(pre.steps())
    made.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, its in zip(tokens, facts["tokenizer.ggml.token_type"]) if its == kind]
        add = made.add_special_tokens if special else made.add_tokens
        add([AddedToken(token, special=special, normalized=False) for token in added])
    bos = _named(facts, tokens, "bos")
    if bos is not None and facts.get("tokenizer.ggml.add_bos_token", pre.begins):
        token = (bos, int(facts["tokenizer.ggml.bos_token_id"]))
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[token]
        )
    return made
