"""Build the tokenizers of GGUF files.

This module builds byte-level BPE vocabularies with a pre-tokenizer in :data:`PRE_TOKENIZERS`, and SentencePiece
vocabularies of Llama models. Transformers converts the others. Its converter lacks some pre-tokenizers. SmolLM2's, for
example, splits digits before the byte-level step, which changes the ids of numbered lists. And it drops the space that
SentencePiece puts before a text, if the text begins with one.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import generate_merges

try:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
except ImportError:  # older transformers, which splits all text as for GPT-2
    GGUF_PRE_TOKENIZER_SPLITS = {}

from fsd_core.errors import ModelLoadError, foreign_errors
from fsd_core.files import write_json
from fsd_infer.targets.gguf_file import read_gguf
from fsd_infer.targets.gguf_keys import end_ids

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # gguf.TokenType
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "\u2581"  # SentencePiece's
# pre-tokenizers that split text as GPT-2's does (llama-vocab.cpp)
_AS_GPT2 = """
gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling
""".split()


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
    facts = read_gguf(source)[0] if facts is None else facts
    if files := [name for name in ("tokenizer.json", "tokenizer.model") if (source.parent / name).is_file()]:
        loaded = AutoTokenizer.from_pretrained(source.parent)
        _check_same(facts, loaded.get_vocab(), source, source.parent / files[0])
        return loaded
    if _pre_tokenizer(facts) is None and not _is_sentencepiece(facts):
        _warn_unknown_pre_tokenizer(facts, source)
        return AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(facts, Path(folder), source)
        return AutoTokenizer.from_pretrained(folder)


def _check_same(facts: dict[str, Any], ids: dict[str, int], source: Path, file: Path) -> None:
    """Raise ModelLoadError if the tokenizer next to a GGUF file with these tokens is another model's."""
    tokens = facts.get("tokenizer.ggml.tokens", ())
    by_id = dict(enumerate(tokens))  # a text may stand twice
    if differs := [(token, at) for at, token in by_id.items() if by_id.get(ids.get(token, at)) != token]:
        token, index = differs[0]
        raise ModelLoadError(
            f"{file} is not the tokenizer of {source.name}: {token!r:.40} is token {ids[token]} there and {index} "
            "in the GGUF file. Put one of them into a directory of its own."
        )


def _warn_unknown_pre_tokenizer(facts: dict[str, Any], source: Path) -> None:
    """Warn of a pre-tokenizer for which transformers takes GPT-2's."""
    pre = facts.get("tokenizer.ggml.pre")
    if facts.get("tokenizer.ggml.model") == "gpt2" and pre not in {*_AS_GPT2, *GGUF_PRE_TOKENIZER_SPLITS}:
        warnings.warn(
            f"{source}: its pre-tokenizer {pre!r:.40} is not known here, so text is split as for GPT-2, perhaps into "
            "other tokens than in training. Put the model's tokenizer.json next to the file.",
            stacklevel=4,
        )


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
    if pre is None and not _is_sentencepiece(facts):
        raise ModelLoadError(
            f"{source} has a {facts.get('tokenizer.ggml.model')!r} vocabulary with pre-tokenizer "
            f"{facts.get('tokenizer.ggml.pre')!r}. Only gpt2 with {', '.join(PRE_TOKENIZERS)} and, in Llama models, "
            "llama are known."
        )
    with foreign_errors(ModelLoadError, f"{source}: its vocabulary is incomplete or invalid ({{why}}).", most=200):
        tokens = _tokens(facts)
        tokenizer = _sentencepiece(facts, tokens) if pre is None else _byte_level(facts, tokens, pre)
        _add_special_tokens(tokenizer, facts, tokens, begins=pre is None or pre.begins)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    settings, template = _settings(facts, tokens)
    if isinstance(template, str):  # in both places, because readers differ
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(out_dir / "tokenizer_config.json", settings, indent=2)


def _settings(facts: dict[str, Any], tokens: list[str]) -> tuple[dict[str, Any], Any]:
    """Return the tokenizer's configuration, and its chat template: a text, a list of named ones, or None."""
    special = {role: _named(facts, tokens, key) for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"))}
    special["pad"] = _named(facts, tokens, "padding") or special["eos"]
    named = {"default": facts.get(_TEMPLATE)}
    named |= {name.removeprefix(f"{_TEMPLATE}."): facts[name] for name in facts if name.startswith(f"{_TEMPLATE}.")}
    templates = [{"name": name, "template": template} for name, template in named.items() if template]
    template: Any = named["default"] if len(templates) == 1 and named["default"] else templates or None
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(facts[f"{facts['general.architecture']}.context_length"]),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **{f"{role}_token": token for role, token in special.items() if token is not None},
        **({"chat_template": template} if template else {}),
    }
    return settings, template


def _is_sentencepiece(facts: dict[str, Any]) -> bool:
    """Whether this is a Llama model's SentencePiece vocabulary. Other families' have rules of their own."""
    return facts.get("general.architecture") == facts.get("tokenizer.ggml.model") == "llama"


def _tokens(facts: dict[str, Any]) -> list[str]:
    """Return the vocabulary. Raise ValueError for duplicate tokens, and for shorter lists of scores or types."""
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(facts["tokenizer.ggml.tokens"])]
    if len(set(tokens)) < len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise ValueError(f"token {twice!r:.40} is there twice")
    for name in ("token_type", "scores"):
        if len(facts.get(f"tokenizer.ggml.{name}", tokens)) < len(tokens):
            raise ValueError(f"tokenizer.ggml.{name} has fewer entries than there are tokens")
    return tokens


def _pre_tokenizer(facts: dict[str, Any]) -> PreTokenizer | None:
    gpt2 = facts.get("tokenizer.ggml.model") == "gpt2"
    return PRE_TOKENIZERS.get(str(facts.get("tokenizer.ggml.pre"))) if gpt2 else None


def _named(facts: dict[str, Any], tokens: list[str], role: str) -> str | None:
    index = facts.get(f"tokenizer.ggml.{role}_token_id")
    return None if index is None else tokens[index]


def _byte_level(facts: dict[str, Any], tokens: list[str], pre: PreTokenizer) -> Tokenizer:
    merges = [tuple(pair.split(" ", 1)) for pair in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    result = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        result.normalizer = normalizers.NFC()
    result.pre_tokenizer = pre_tokenizers.Sequence(pre.steps())
    result.decoder = decoders.ByteLevel()
    return result


def _sentencepiece(facts: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """Build a vocabulary whose pairs merge in the order of their scores; bytes stand for unknown characters."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    types = facts["tokenizer.ggml.token_type"]
    skipped = [token for token, token_type in zip(tokens, types) if token_type in (_UNKNOWN, _CONTROL)]
    merges = generate_merges(vocabulary, dict(zip(tokens, facts["tokenizer.ggml.scores"])), skipped)
    unknown = _named(facts, tokens, "unknown")
    result = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    begins = bool(facts.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    result.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if begins else spaces
    strip = [decoders.Strip(" ", 1, 0)] if begins else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    result.decoder = decoders.Sequence(steps)
    return result


def _add_special_tokens(tokenizer: Tokenizer, facts: dict[str, Any], tokens: list[str], begins: bool) -> None:
    """Add the special tokens, and those that stand around each text; ``begins``: BOS does if the file does not say."""
    token_types = list(facts["tokenizer.ggml.token_type"])
    for index in end_ids(facts):
        token_types[index] = _CONTROL
    control = [_UNKNOWN, _CONTROL] if _is_sentencepiece(facts) else [_CONTROL]
    for chosen, special in ((control, True), ([_USER_DEFINED], False)):
        added = [token for token, token_type in zip(tokens, token_types) if token_type in chosen]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(token, special=special, normalized=False) for token in added])
    bos = _named(facts, tokens, "bos") if facts.get("tokenizer.ggml.add_bos_token", begins) else None
    eos = _named(facts, tokens, "eos") if facts.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is not None or eos is not None:
        template = " ".join([*([bos] if bos else []), "{}", *([eos] if eos else [])])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template.format("$A"),
            pair=f"{template.format('$A')} {template.format('$B')}",
            special_tokens=[(token, tokens.index(token)) for token in {bos, eos} if token is not None],
        )
