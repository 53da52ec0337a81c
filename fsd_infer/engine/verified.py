"""A tree after verification: the target's logits at its nodes, and the input of the rules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor

from fsd_infer.engine.state import DecodeState
from fsd_infer.rules import RoundInput
from fsd_infer.trees.tree import DraftTree


class VerifiedTree:
    """A tree with the target's logits and features at its nodes.

    The rest is computed when a rule asks for it: by the device, or by the host if :attr:`.DecodeState.asks_host`.

    Attributes:
        tree: the drafts.
        logits: [B, N, V] the target's, in its dtype.
        features: [B, N, F] the target's.
        recurrent: what recurrent layers keep of the nodes until some are accepted.
    """

    def __init__(self, state: DecodeState, tree: DraftTree, logits: Tensor, features: Tensor) -> None:
        self.tree, self.logits, self.features, self._state = tree, logits, features, state
        self.recurrent: dict[Hashable, Any] = dict(state.cache.recurrent.kept)
        self._seen_ngrams: dict[int, Tensor | None] = {}

    def round_input(self, uniforms: Tensor, max_accepted: Tensor | None) -> RoundInput:
        """Return the input of the rules.

        Args:
            uniforms: [B, N, 3] in [0, 1).
            max_accepted: [B] most drafts that each row may accept; None: all.
        """
        state = self._state
        return RoundInput(
            tree=self.tree,
            logits=self.raw_logits,
            scores=self.scores,
            greedy=state.greedy,
            uniforms=uniforms,
            budget_left=state.budget,
            process_draft=(lambda tree: self.draft_scores) if state.processors else None,
            texts=state.texts,
            kl_excess=state.kl_excess,
            seen_ngrams=self.seen_ngrams if state.session.reads_other_texts else None,
            max_accepted=max_accepted,
        )

    @cached_property
    def raw_logits(self) -> Tensor:
        """The logits that processors read: in fp32, as in generate. Rules convert what they look at."""
        return self.logits.float() if self._state.processors else self.logits

    @cached_property
    def _texts(self) -> Sequence[Tensor | None]:
        return self._state.history() if self._state.processors.contextual else ()

    @cached_property
    def scores(self) -> Tensor:
        """[B, N, V] the logits after the request's processors."""
        state = self._state
        if not state.processors:
            return self.logits
        return state.processors.nodes(self.raw_logits, self.tree, self._texts, state.padded_prompt_indices)

    @cached_property
    def draft_scores(self) -> Tensor:
        """[B, I, V] the drafter's logits after them."""
        state = self._state
        return state.processors.drafts(self.tree, self.logits.shape[-1], self._texts, state.padded_prompt_indices)

    def seen_ngrams(self, n: int) -> Tensor | None:
        """[B, N] bool; the drafts that complete an n-gram of other texts that the drafter reads."""
        if n not in self._seen_ngrams:
            self._seen_ngrams[n] = self._state.session.seen_ngrams(self.tree, n)
        return self._seen_ngrams[n]

    def compute(self, name: Hashable) -> None:
        """Compute what :meth:`computed` returns by this name."""
        if isinstance(name, int):
            self.seen_ngrams(name)
        else:
            getattr(self, str(name))

    def computed(self) -> dict[Hashable, Tensor]:
        """Return what the host has computed so far, by name; drafts that complete seen n-grams by n."""
        names = ("scores", "draft_scores") if self._state.processors.contextual else ()
        values: dict[Hashable, Tensor] = {name: vars(self)[name] for name in names if name in vars(self)}
        return values | {n: seen for n, seen in self._seen_ngrams.items() if seen is not None}

    def with_computed(self, state: DecodeState, computed: Mapping[Hashable, Tensor] | None = None) -> VerifiedTree:
        """Return the same tree for ``state`` with these results of :meth:`computed`, and no others."""
        tree = VerifiedTree(state, replace(self.tree), self.logits, self.features)
        tree.recurrent = self.recurrent
        for name, values in (computed or {}).items():
            if isinstance(name, int):
                tree._seen_ngrams[name] = values
            else:
                vars(tree)[str(name)] = values
        return tree
