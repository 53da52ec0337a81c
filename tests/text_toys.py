"""A tiny tokenizer with a chat template, and a tiny random target that has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# shows an empty thought in the last answer only, as Qwen3's does
THINKING = CHATML.replace(
    "{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}",
    "{{ '<|start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|end|>\n' }}",
)
# opens an answered turn in other words than it asks for an answer
OTHERWISE = CHATML.replace("{{ '<|start|>assistant\n' }}", "{{ '<|start|>bot\n' }}")
CORPUS = [
    "the cat sat on the mat", "what is the answer to that", "it is there", "the end\n\n", "assistant user system",
]  # fmt: skip


def tiny_tokenizer(template: Any = CHATML) -> Any:
    """A byte-level BPE tokenizer of about 300 tokens with the special tokens <|end|> (eos), <|start|> and <|pad|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|start|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|start|>", pad_token="<|pad|>"
    )
    fast.chat_template = template
    return fast


def save_tiny_chat_target(directory: Path, seed: int = 0, max_positions: int = 256, hidden_size: int = 32) -> Path:
    """Directory of a random llama of two layers in fp32 with the tiny tokenizer; its answers end now and then."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=max_positions,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_sentencepiece(merges: bool = True) -> Any:
    """A tokenizer as SentencePiece's, of the special tokens <unk>, <s> (added to texts), </s> (eos), bytes and pieces.

    Args:
        merges: whether it has pieces of several characters.
    """
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyzé"]
    pairs = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("a", "t"), ("\u2581", "c"), ("\u2581c", "at"), ("i", "s")]
    pairs = pairs if merges else []
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *map("".join, pairs)]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def relabelled(tokenizer: Any, order: list[int]) -> Any:
    """The same tokenizer with other ids: token ``order[i]`` of the given one has id i."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    ids = {old: new for new, old in enumerate(order)}
    state["model"]["vocab"] = {name: ids[old] for name, old in state["model"]["vocab"].items()}
    for added in state["added_tokens"]:
        added["id"] = ids[added["id"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=tokenizer.eos_token,
        bos_token=tokenizer.bos_token, pad_token=tokenizer.pad_token,
    )  # fmt: skip
