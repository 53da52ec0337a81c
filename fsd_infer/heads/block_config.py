"""Shape and options of a block head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BlockConfig:
    """The shape and options of a block head, in our terms.

    Attributes:
        layer: fields of its Qwen3 layers, as :attr:`EagleConfig.layer`.
        num_layers: number of layers of the head.
        layers: the target's layers whose outputs it reads, ascending and counted from 0.
        target_size: width of the target's features.
        vocab_size: V.
        block_size: tokens of the block, the root included.
        mask_token_id: the token that stands for those to estimate.
        fills_in: whether slot k of the block estimates the token at its own position, so that the root's slot is idle;
            else the token after it.
        windows: attention window of each layer; None: all.
        causal: whether each layer's block attends only to earlier slots.
        root_windows: whether every slot sees as many tokens as a window has before the root, and the whole block; else
            each slot sees the last ones of its own window, itself included.
        sinks: whether each attention head has one more logit, which takes weight from all it attends to.
        taps: slots that the convolutions around DFlash2's sublayers reach, their own included; 0: there are none.
        group: channels that share their dynamic part.
        draft_vocab_size: Vd if the head has its own LM head; None: it uses the target's.
        own_embeddings: whether it has an embedding table of its own.
        softcap: bound of the logits; None: none.
        correction: "vanilla", "gated" or "rnn", a Markov head; "domino"; "selector" of DFlash2; "refiner" of XPress;
            None.
        rank: of the Markov head, selector or refiner, or width of Domino's embeddings.
        inner: width of the refiner's MLP.
        candidates: number of a slot's likeliest tokens that the selector scores.
        state_size: width of Domino's recurrent state.
        plain_slots: estimates that Domino leaves uncorrected.
        confidence: "state" or "state+token", what a confidence head reads; None: there is none.
    """

    layer: dict[str, Any]
    num_layers: int
    layers: tuple[int, ...]
    target_size: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    fills_in: bool
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()
    root_windows: bool = False
    sinks: bool = False
    taps: int = 0
    group: int = 1
    draft_vocab_size: int | None = None
    own_embeddings: bool = False
    softcap: float | None = None
    correction: str | None = None
    rank: int = 0
    inner: int = 0
    candidates: int = 0
    state_size: int = 0
    plain_slots: int = 0
    confidence: str | None = None

    @property
    def depth(self) -> int:
        """Tokens that one pass estimates."""
        return self.block_size - self.fills_in

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.layer["hidden_size"])
