"""The rounds of one answer, with drafts, verification and emitted tokens, as JSON values for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsd_infer.chat.encoding import token_pieces
from fsd_infer.divergence import divergence, expand_draft
from fsd_infer.engine.ngrams import kinds
from fsd_infer.engine.request import Round
from fsd_infer.rules import Source

SOURCES = {
    "memory": "memory",
    "lookup": "memory",
    "recycle": "recycle",
    "guide": "grammar",
}  # source by proposer; any other proposer is a "head"


class Trace:
    """The rounds of one answer.

    Args:
        tokenizer: of the target.
        prompt: token ids.
        proposers: of the drafter, see :attr:`.Drafter.proposers`.

    Attributes:
        rounds: values that :meth:`add` returned, in order. The first is the prefill, without nodes.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], proposers: Sequence[str]) -> None:
        self.tokenizer, self.prompt = tokenizer, list(prompt)
        self.proposers = [SOURCES.get(name, "head") for name in (*proposers, "guide")]  # as ForcedDrafter does
        self.tokens: list[int] = []
        self._shown = 0  # characters of the text that pieces hold
        self.rounds: list[dict[str, Any]] = []

    def add(self, round: Round) -> dict[str, Any]:
        """Add a round. Return its seconds by phase, the tree's nodes and the emitted tokens."""
        log_p = round.logits.float().log_softmax(-1)
        log_q = _draft_log_probs(round, log_p.shape[-1])
        made = {
            **{name: round.seconds.get(name, 0.0) for name in ("draft", "target", "rule")},
            "nodes": self._nodes(round, log_p, log_q) if self.rounds else [],
            "tokens": self._emitted(round, log_p, log_q),
        }
        if not self.rounds:
            made["target"] = round.seconds.get("prefill", 0.0)
        self.rounds.append(made)
        return made

    def _nodes(self, round: Round, log_p: Tensor, log_q: dict[int, Tensor]) -> list[dict[str, Any]]:
        """Every node, the root first, with its log-probabilities after its parent under target and drafter."""
        accepted = round.path[: len(round.tokens)]
        found = []
        for node, (token, parent) in enumerate(zip(round.nodes, round.parents, strict=True)):
            known = log_q.get(parent)
            found.append(
                {
                    "text": token_pieces(self.tokenizer, [round.nodes[parent], token])[-1],
                    "parent": parent,
                    "lnp": float(log_p[parent, token]) if node else 0.0,
                    "lnq": None if known is None or not node else _finite(known[token]),
                    "source": self.proposers[round.proposers[node]] if node else None,
                    "accepted": node in accepted,
                }
            )
        return found

    def _emitted(self, round: Round, log_p: Tensor, log_q: dict[int, Tensor]) -> list[dict[str, Any]]:
        before = len(self.tokens)
        pieces = [self._piece(token) for token in round.tokens]
        new_or_not = kinds(self.prompt, self.tokens)
        js = divergence("js")
        found = []
        for step, emission in enumerate(round.emissions):
            node, place, token = round.path[step], before + step, emission.token
            own, known = log_p[node], log_q.get(node)
            best = int(own.argmax())
            found.append(
                {
                    "text": pieces[step],
                    "source": "target" if emission.proposer < 0 else self.proposers[emission.proposer],
                    "lossy": emission.source == Source.GATE,
                    "lnp": _finite(own[token]),
                    "rank": 1 + int((own > own[token]).sum()),
                    "best": token_pieces(self.tokenizer, [*self.tokens[max(place - 1, 0) : place], best])[-1],
                    "best_lnp": float(own[best]),
                    "lnq": None if known is None else _finite(known[token]),
                    "js": None if known is None else float(js(own[None], known[None])[0]),
                    "nats": emission.nats,
                    "copied": new_or_not[place] == "copied",
                    "repeated": new_or_not[place] == "repeated",
                }
            )
        return found

    def _piece(self, token: int) -> str:
        """The text that the next token adds. A token that ends inside a character adds nothing."""
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece, self._shown = text[self._shown :], len(text)
        return piece


def _draft_log_probs(round: Round, vocabulary: int) -> dict[int, Tensor]:
    """Inner node -> the drafter's log-probabilities [V], -inf outside its vocabulary, if it gave any."""
    logits = expand_draft(round.q_logits.float(), round.draft_ids, vocabulary)
    return {node: logits[row].log_softmax(-1) for node, row in enumerate(round.q_index) if row >= 0}


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if number > -1e30 else None
