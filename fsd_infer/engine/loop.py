"""The decoding loop: draft a tree, verify it in one target forward, apply the rule, commit the accepted path.

The target encapsulates the model family, the drafter proposes, and the rule accepts. Each batch row has its own text
length and accepted length; nothing is padded on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fsd_core.errors import FsdError
from fsd_core.tensors import at_nodes, padded, to_device, visible_slots
from fsd_infer.device.clock import clock_of
from fsd_infer.device.cores import Team
from fsd_infer.device.cuda_graphs import TOKENS
from fsd_infer.device.memory import check_caches
from fsd_infer.drafters.auto import AutoTree
from fsd_infer.drafters.base import Drafter, DraftRequest
from fsd_infer.drafters.estimates import LawKind
from fsd_infer.drafters.shape import AUTO
from fsd_infer.engine.request import Outcome, Request, Round
from fsd_infer.engine.stats import GenerationStats, RowRecord, describe_rules
from fsd_infer.request.processors import TreeProcessors
from fsd_infer.request.prompts import check_prompts, read_prompts
from fsd_infer.rules import Rule, Texts, Verdict, Verification, apply_rules
from fsd_infer.rules.texts import markers_of
from fsd_infer.rules.tilted import FIRST_PRICE
from fsd_infer.targets.prefixes import PrefixSession
from fsd_infer.targets.target import Target
from fsd_infer.tree import DraftTree


def decode(target: Target, drafter: Drafter, rule: Rule | Sequence[Rule], request: Request) -> Outcome:
    """Decode a batch with one rule, or with one per prompt. Threads with one target take turns, request by request.

    Raises:
        FsdError: an empty prompt, an unknown token id, or a processor that does not support trees.
        ContextLengthError: a prompt that leaves no room in the target's context.
        CacheMemoryError: KV caches that exceed the free or allowed memory; nothing is allocated then.
        NonFiniteLogitsError: NaN, +inf or all -inf logits.
    """
    with target.lock, target.without_gradients(), Team(target.device, request.generator is not None) as team:
        batch = _Batch(target, drafter, rule, request, team)
        batch.prefill()
        while batch.rows:
            tree = batch.draft()
            logits, features = batch.verify(tree)
            verdict = batch.apply_rule(tree, logits)
            batch.emit(tree, verdict, logits)
            batch.observe(tree, logits, verdict)
            batch.commit_cache(verdict)
            batch.advance(verdict, features)
        return batch.outcome()


@dataclass
class _Row:
    """A prompt with its answer.

    Attributes:
        number: index in the request.
        limit: most tokens of the answer.
    """

    number: int
    prompt: list[int]
    rule: Rule
    limit: int
    record: RowRecord = field(default_factory=RowRecord)


class _Batch:
    """A request in progress; ``rows`` are the unfinished ones.

    Texts, lengths, verdicts and budgets are on the CPU, the models' outputs on their device. Each round syncs with the
    device once, to read the verdict. docs/decisions.md lists the exceptions.
    """

    def __init__(
        self, target: Target, drafter: Drafter, rule: Rule | Sequence[Rule], request: Request, team: Team
    ) -> None:
        prompts, count = request.prompts, len(request.prompts)
        rules = [rule] * count if isinstance(rule, Rule) else list(rule)
        if len(rules) != count:
            raise FsdError(f"{len(rules)} rules for {count} prompts: give one rule, or one per prompt.")
        limits = check_prompts(target, prompts, request.max_new_tokens)
        self.all_rows = [_Row(*facts) for facts in zip(range(count), prompts, rules, limits, strict=True)]
        self.rows = list(self.all_rows)
        self.target, self.request, self.device = target, request, target.device
        self.processors = TreeProcessors(request.processors, count)
        self.team, self.clock = team, clock_of(self.device)
        self.phases: dict[str, float] = {}  # seconds by phase at the last ``on_round``
        self.prefill_seconds = 0.0
        kept = target.prefixes
        if kept is not None and kept.gives_back and request.generator is not None:
            kept = None  # a seeded answer comes again, to its last bit
        self.prefixes = PrefixSession(kept, target.captured_layers, request.cache_keys)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts])  # [B] tokens that the target has read
        markers = markers_of(rules, target.tokenizer)
        self.texts = Texts([row.record.tokens for row in self.rows], prompts, self.device, markers)
        self.budget = torch.tensor([rule.nats for rule in rules], dtype=torch.float64)  # [B] remaining nats
        self.overspent = torch.zeros(count, device=self.device)  # [B] nats beyond the allowance of learned prices
        tilt = sum(rule.tilt(request.greedy) for rule in rules) / count
        self.drafter = drafter.for_law(tilt)
        self.auto = self._auto_tree(tilt)
        self._allocate(tilt)

    def _auto_tree(self, tilt: float) -> AutoTree | None:
        """Return what chooses each round's tree; None for a drafter of fixed shape."""
        drafter, request = self.drafter, self.request
        if drafter.auto is None:
            return None
        names = {row.rule.name for row in self.rows}
        law = LawKind(tilt, names.pop() if len(names) == 1 else "several", drafter.samples and not request.greedy)
        recorded = None if self.target.graphs is None else TOKENS
        learns = request.generator is None and not self.target.is_sharded  # otherwise trees depend on the text alone
        return AutoTree(drafter.auto, len(self.rows), law, drafter.max_nodes, recorded, learns)

    def _allocate(self, tilt: float) -> None:
        """Allocate the target's cache and start the drafter's session. Raises CacheMemoryError."""
        target, drafter, request, count = self.target, self.drafter, self.request, len(self.rows)
        longest = max(len(row.prompt) + row.limit for row in self.rows)
        capacity = longest + drafter.max_nodes
        # the drafter pads rows to the one that emitted most: its texts exceed the longest by up to a tree's depth
        reach = longest + 1 + drafter.max_depth
        self.cache_bytes = target.cache_bytes(count, capacity) + drafter.cache_bytes(count, reach)
        held = target.held_bytes + drafter.held_bytes
        check_caches(self.cache_bytes, count, capacity, self.device, request.max_cache_bytes, held)
        self.cache = target.new_cache(count, capacity)
        process = self.processors.of_drafts if self.processors else None
        draws = not request.greedy and all(row.rule.draws_trees for row in self.rows)
        first = torch.tensor([row.prompt[0] for row in self.rows])
        drafted = DraftRequest(
            count, reach, request.greedy, process, request.generator, self.device, tilt, self.auto, request.cache_keys,
            draws,
        )  # fmt: skip
        self.session = drafter.start(first, drafted)

    def prefill(self) -> None:
        """Read the prompts, emit each row's first token, and pass the prompts' features to the drafter."""
        tokens = padded(self.request.prompts)
        ends = (self.lengths - 1)[:, None]
        known = self.prefixes.known(self.request.prompts)
        features, logits = read_prompts(self.target, self.cache, tokens, self.lengths, known)
        tree = DraftTree.root_only(to_device(tokens.gather(1, ends)[:, 0], self.device), logits.shape[-1])
        verdict = self._verdict(tree, logits)
        self.emit(tree, verdict, logits, "prefill")
        self.session.observe(tree, logits, verdict.path, verdict.tokens, verdict.accepted)
        # the drafter reads pairs (feature of token i, token i+1): the prompt shifted by one, then the first new token
        following = torch.cat([tokens[:, 1:], tokens[:, :1]], 1).scatter(1, ends, verdict.tokens[:, :1])
        self._advance(verdict, following, features, self.lengths)
        self.clock.lap("prefill")
        self.prefill_seconds = self.clock.seconds

    def draft(self) -> DraftTree:
        """Draft a tree under each text's last token, which the target has not read yet."""
        self.team.fit()
        self._mark()
        tree = self.session.draft(self.roots)
        self._mark()
        self.clock.lap("draft")
        return tree

    def verify(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """Run the target over all nodes; return logits [B, N, V] in its dtype and features [B, N, F]."""
        slots = to_device(self.lengths[:, None] + torch.arange(tree.tokens.shape[1]), self.device)
        positions = slots[:, :1] + tree.depths
        visible = visible_slots(self.lengths, tree.ancestors)
        limit = self.target.max_positions
        if limit is not None:  # the answer ends before nodes beyond the context matter
            positions = positions.clamp_max(limit - 1)
        self.cache.set_write_slots(slots, int(self.lengths[0]) if len(self.rows) == 1 else None, visible.shape[-1])
        logits, features = self.target.forward(tree.tokens, positions, visible, self.cache)
        for row in self.rows:
            row.record.target_forwards += 1
        self.clock.lap("target")
        return logits, features

    def apply_rule(self, tree: DraftTree, logits: Tensor) -> Verdict:
        """Apply each row's rule."""
        verdict = self._verdict(tree, logits)
        self._mark()
        return verdict

    def emit(self, tree: DraftTree, verdict: Verdict, logits: Tensor, phase: str = "rule") -> None:
        """Append each row's new tokens, up to and including the first that ends its answer."""
        on_round, on_tokens, seconds = self.request.on_round, self.request.on_tokens, {}
        if on_round is not None:
            self.clock.lap(phase)
            seconds = self._new_seconds()
        log_p = _log_likelihoods(verdict, logits) if self.request.measure_log_likelihood else None
        elapsed = self.clock.seconds - self.prefill_seconds if self.prefill_seconds else 0.0
        for place, (row, emissions) in enumerate(zip(self.rows, verdict.emissions(log_p), strict=True)):
            record, start = row.record, len(row.record.tokens)
            record.decode_seconds = elapsed
            for emission in emissions:
                record.tokens.append(emission.token)
                record.emissions.append(emission)
                record.finish_reason = self._finish_reason(row)
                if record.finish_reason:
                    break
            if on_round is not None:
                on_round(row.number, Round.of(tree, place, logits, verdict, record.emissions[start:], seconds))
            if on_tokens is not None and on_tokens(row.number, record.tokens[start:]):
                record.finish_reason = record.finish_reason or "stop"
        if phase == "rule":  # the prefill continues
            self.clock.lap(phase)

    def observe(self, tree: DraftTree, logits: Tensor, verdict: Verdict) -> None:
        """Pass the target's logits at the tree's nodes to the drafter."""
        self.session.observe(tree, logits, verdict.path, verdict.tokens, verdict.accepted)
        self.clock.lap("draft")

    def commit_cache(self, verdict: Verdict) -> None:
        """Move the accepted path's keys and values to the end of the text. The root is in place already."""
        path, accepted = verdict.path.tolist(), verdict.accepted.tolist()
        if any(row[: count + 1] != list(range(count + 1)) for row, count in zip(path, accepted)):
            steps = torch.arange(verdict.path.shape[1])
            destinations = self.lengths[:, None] + steps
            sources = self.lengths[:, None] + verdict.path.where(steps <= verdict.accepted[:, None], steps)
            self.cache.move(to_device(sources, self.device), to_device(destinations, self.device))
        self.clock.lap("cache")

    def advance(self, verdict: Verdict, features: Tensor) -> None:
        """Extend each text by its accepted path, and pass the new tokens with their features to the drafter."""
        counts = verdict.accepted + 1
        self.lengths = self.lengths + counts
        left = (self.budget - verdict.spent.sum(1)).clamp_min(0.0)
        self.budget = torch.where(self.budget.isinf(), self.budget, left)  # infinite budgets pay infinite costs
        self._advance(verdict, verdict.tokens, at_nodes(features, to_device(verdict.path, self.device)), counts)
        self.clock.lap("draft")

    def outcome(self) -> Outcome:
        """Return the answers and their statistics."""
        seconds = self.clock.seconds  # before the sync that reads the phases
        records = [row.record for row in self.all_rows]
        stats = GenerationStats(
            rows=[row.record.finish(self.prefill_seconds, row.prompt, self.drafter.proposers) for row in self.all_rows],
            rule=describe_rules([row.rule for row in self.all_rows]),
            drafter=self.drafter.describe() | ({} if self.auto is None else {"tree": AUTO}),
            seconds=seconds,
            prefill_seconds=self.prefill_seconds,
            known=self.prefixes.known_tokens,
            phases=self.clock.phases(),
            cache_bytes=self.cache_bytes,
            trees=None if self.auto is None else self.auto.trees,
        )
        return Outcome([record.tokens for record in records], records, stats)

    # parts -----------------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        if self.auto is not None:
            self.auto.mark()

    def _verdict(self, tree: DraftTree, logits: Tensor) -> Verdict:
        processors, rows = self.processors, [row.number for row in self.rows]
        texts = [self._text(row)[:-1] for row in self.rows] if processors.contextual else []
        if processors:  # in fp32, as in generate; rules convert what they look at
            logits = logits.float()

        def process_draft(drafted: DraftTree) -> Tensor:
            return processors.drafts(drafted, logits.shape[-1], texts, rows)

        rules = [row.rule for row in self.rows]
        round = Verification(
            tree=tree,
            logits=logits,
            scores=processors.nodes(logits, tree, texts, rows),
            greedy=self.request.greedy,
            uniforms=torch.rand(*tree.tokens.shape, 3, generator=self.request.generator, device=self.device),
            budget_left=self.budget,
            process_draft=process_draft if processors else None,
            texts=self.texts,
            overspent=self.overspent,
            copies=lambda n: self.session.copies(tree, n),
        )
        verdict = apply_rules(rules, round)
        if verdict.allowed is not None:
            spent = to_device(verdict.spent.sum(1).float(), self.device)
            self.overspent = (self.overspent + spent - verdict.allowed).clamp_min(-FIRST_PRICE)  # limits saved nats
        return verdict

    def _new_seconds(self) -> dict[str, float]:
        """Return seconds by phase since the last call."""
        before, self.phases = self.phases, self.clock.phases()
        return {phase: total - before.get(phase, 0.0) for phase, total in self.phases.items()}

    def _finish_reason(self, row: _Row) -> str | None:
        """Return why the answer ends with its newest token, or None."""
        tokens, ends = row.record.tokens, self.request.ends
        reason = None if ends is None else ends(row.number, tokens[-1])
        if tokens[-1] in self.request.eos_token_ids:
            return "stop"
        if reason is not None:
            return reason
        if self.request.criteria:
            text = to_device(self._text(row)[None], self.device)
            if bool(self.request.criteria(text, None)[0]):
                return "stop"
        return "length" if len(tokens) >= row.limit else None

    def _text(self, row: _Row) -> Tensor:
        """Return the row's text [T] on the CPU, as ``generate`` would pass it to processors and criteria."""
        prompts = self.request.padded_prompts or self.request.prompts
        return torch.tensor([*prompts[row.number], *row.record.tokens])

    def _advance(self, verdict: Verdict, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        """Drop finished rows, then extend the drafter's texts by tokens [B, K], of which ``counts`` [B] are real.

        features: [B, K, F] of the target before each token.
        """
        self.roots = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        self.prefixes.add([row.number for row in self.rows], features, counts)
        going = [place for place, row in enumerate(self.rows) if row.record.finish_reason is None]
        if len(going) < len(self.rows):
            for place, row in enumerate(self.rows):
                if row.record.finish_reason is not None:
                    text, length = [*row.prompt, *row.record.tokens], int(self.lengths[place])
                    self.prefixes.store(row.number, text, length, partial(self.cache.saved, place))
                    self.session.finish(place, row.prompt, row.record.tokens)
            self.rows = [self.rows[place] for place in going]
            if not going:
                return
            index = torch.tensor(going)
            on_device = to_device(index, self.device)
            tokens, counts, self.roots, self.lengths = (x[index] for x in (tokens, counts, self.roots, self.lengths))
            features, self.overspent = (x.index_select(0, on_device) for x in (features, self.overspent))
            self.budget = self.budget[index]
            self.texts.select(going)
            self.cache.select(index)
            self.session.select(index)
        longest = int(counts.max())
        self.session.extend(tokens[:, :longest], features[:, :longest], counts)
        if self.auto is not None:
            self.auto.end(verdict.path.tolist(), verdict.accepted.tolist(), len(going))


def _log_likelihoods(verdict: Verdict, logits: Tensor) -> list[list[float]]:
    """Return the target's raw log-probability of each emitted token, [B][D+1]."""
    path, tokens = to_device(verdict.path, logits.device), to_device(verdict.tokens, logits.device)
    return at_nodes(logits, path).float().log_softmax(-1).gather(2, tokens[..., None])[..., 0].tolist()
