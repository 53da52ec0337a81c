"""Build the tokenizers of GGUF files.

This module builds byte-level BPE and SentencePiece vocabularies. Transformers converts the others (T5's and Gemma 4's).
Its converter lacks many pre-tokenizers, and drops the space that SentencePiece puts before a text, if the text begins
with one.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import generate_merges

from fsd_core.errors import ModelLoadError, foreign_errors
from fsd_core.files import write_json
from fsd_infer.targets.gguf_file import read_gguf
from fsd_infer.targets.gguf_keys import end_ids
from fsd_infer.targets.gguf_splits import PRE_TOKENIZERS, PreTokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # gguf.TokenType
_TEMPLATE = "tokenizer.chat_template"
_OURS = ("gpt2", "llama")  # kinds of vocabularies
_STAY = ("<unk>", "<s>", "<|endoftext|>")  # the special tokens of Phi-3 that leave the space after them
_SPACE = "\u2581"  # SentencePiece's


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
    if facts.get("tokenizer.ggml.model") not in _OURS:
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


def write_tokenizer(facts: dict[str, Any], out_dir: Path, source: Path) -> None:
    """Write tokenizer.json, its configuration and the chat template.

    Args:
        facts: metadata of the GGUF file.
        out_dir: an existing directory.
        source: the file's name for errors.

    Raises:
        ModelLoadError: an unknown vocabulary.
    """
    if (kind := facts.get("tokenizer.ggml.model")) not in _OURS:
        raise ModelLoadError(f"{source} has a {kind!r} vocabulary. Only {' and '.join(_OURS)} are known here.")
    pre = _pre_tokenizer(facts, source)
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


def _tokens(facts: dict[str, Any]) -> list[str]:
    """Return the vocabulary. Raise ValueError for duplicate tokens, and for shorter lists of scores or types."""
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(facts["tokenizer.ggml.tokens"])]
    if _is_gemma(facts):  # their files have some tokens of spaces as real ones
        tokens = [_SPACE * len(token) if token.isspace() and set(token) == {" "} else token for token in tokens]
    if len(set(tokens)) < len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise ValueError(f"token {twice!r:.40} is there twice")
    for name in ("token_type", "scores"):
        if len(facts.get(f"tokenizer.ggml.{name}", tokens)) < len(tokens):
            raise ValueError(f"tokenizer.ggml.{name} has fewer entries than there are tokens")
    return tokens


def _pre_tokenizer(facts: dict[str, Any], source: Path) -> PreTokenizer | None:
    """Return how a byte-level vocabulary splits text, None for SentencePiece. Warn of a name that is not known."""
    if facts.get("tokenizer.ggml.model") != "gpt2":
        return None
    pre = facts.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        warnings.warn(
            f"{source}: its pre-tokenizer {pre!r:.40} is not known here, so text is split as for GPT-2, perhaps into "
            "other tokens than in training. Put the model's tokenizer.json next to the file.",
            stacklevel=5,
        )
    return PRE_TOKENIZERS.get(str(pre), PRE_TOKENIZERS["gpt-2"])


def _is_gemma(facts: dict[str, Any]) -> bool:
    """Whether this is the SentencePiece vocabulary of a Gemma model, which merges in the order of the tokens."""
    return facts.get("tokenizer.ggml.model") == "llama" and str(facts.get("general.architecture")).startswith("gemma")


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
    scores = range(0, -len(tokens), -1) if _is_gemma(facts) else facts["tokenizer.ggml.scores"]
    merges = generate_merges(vocabulary, dict(zip(tokens, scores)), skipped)
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
    sentencepiece = facts.get("tokenizer.ggml.model") == "llama"
    control = [_UNKNOWN, _CONTROL] if sentencepiece else [_CONTROL]
    strips = sentencepiece and facts.get("general.architecture") == "phi3"  # Phi-3's markers of turns take line breaks
    for chosen, special in ((control, True), ([_USER_DEFINED], False)):
        added = [token for token, token_type in zip(tokens, token_types) if token_type in chosen]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([
            AddedToken(token, special=special, normalized=False, rstrip=special and strips and token not in _STAY)
            for token in added
        ])  # fmt: skip
    bos = _named(facts, tokens, "bos") if facts.get("tokenizer.ggml.add_bos_token", begins) else None
    eos = _named(facts, tokens, "eos") if facts.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is not None or eos is not None:
        template = " ".join([*([bos] if bos else []), "{}", *([eos] if eos else [])])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template.format("$A"),
            pair=f"{template.format('$A')} {template.format('$B')}",
            special_tokens=[(token, tokens.index(token)) for token in {bos, eos} if token is not None],
        )
