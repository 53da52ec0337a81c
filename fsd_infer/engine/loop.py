"""The decoding loop: draft a tree, verify it in one target forward, let the rule choose, keep the accepted path.

Everything family-specific is in the target, everything about proposing in the drafter, everything about accepting
in the rule. Each row of a batch has its own text length and accepted length; nothing is padded on the left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from fsd_infer.device.clock import clock_of
from fsd_infer.device.cuda_graphs import TOKENS
from fsd_infer.device.memory import check_caches
from fsd_infer.device.transfer import to_device
from fsd_infer.drafters.base import Drafter, DraftRequest
from fsd_infer.drafters.learning import LearningSession
from fsd_infer.drafters.online import Law
from fsd_infer.drafters.shape import AUTO
from fsd_infer.engine.rounds import Round
from fsd_infer.engine.stats import GenerationStats, RowRecord
from fsd_infer.errors import FsdError
from fsd_infer.request.processors import TreeProcessors
from fsd_infer.request.prompts import check_prompts, read_prompts
from fsd_infer.rules import Rule, Texts, Verdict, Verification, apply_rules
from fsd_infer.rules.phases import markers_of
from fsd_infer.rules.tilted import FIRST_PRICE
from fsd_infer.targets.prefixes import Prefix
from fsd_infer.targets.target import Target
from fsd_infer.tree import DraftTree, at_nodes, visible_slots


@dataclass
class Request:
    """One batch to decode, as ``generate`` would prepare it.

    Attributes:
        prompts: token ids per row, without padding, none empty.
        max_new_tokens: upper bound of each answer's length.
        greedy: temperature 0.
        processors: prepared logits processors, temperature included.
        criteria: prepared stopping criteria other than end-of-sequence and length. They are called with the text alone:
            their ``scores`` are None.
        eos_token_ids: tokens that end an answer.
        generator: randomness; None for torch's global generator.
        on_round: called with (row, round) before ``on_tokens``, if anyone looks on.
        on_tokens: called with (row, tokens) as soon as tokens of an answer are final; what is true of its result ends
            the answer there.
        padded_prompts: the prompts as processors and criteria are to see them, left-padded; None: without padding.
        measure_log_likelihood: record the target's log-probability of each emitted token.
        max_cache_bytes: most that the key-value caches may take; None: what is free.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    greedy: bool = True
    processors: LogitsProcessorList | None = None
    criteria: StoppingCriteriaList | None = None
    eos_token_ids: frozenset[int] = frozenset()
    generator: torch.Generator | None = None
    on_round: Callable[[int, Round], None] | None = None
    on_tokens: Callable[[int, list[int]], object] | None = None
    padded_prompts: list[list[int]] | None = None
    measure_log_likelihood: bool = False
    max_cache_bytes: int | None = None


@dataclass
class Outcome:
    """Answers (new tokens only), per-token records and statistics; of beams each answer's score too, else None."""

    sequences: list[list[int]]
    records: list[RowRecord]
    stats: GenerationStats
    scores: list[float] | None = None


def decode(target: Target, drafter: Drafter, rule: Rule | Sequence[Rule], request: Request) -> Outcome:
    """Decode a batch, by one rule or by one per prompt. Threads that decode with one target take turns, request by
    request.

    Raises:
        FsdError: an empty prompt, a token id that the target does not know, a processor that cannot look at a tree.
        ContextLengthError: a prompt that leaves no room in the target's context.
        CacheMemoryError: key-value caches that take more memory than is free or allowed; none is allocated then.
        NonFiniteLogitsError: NaN, +inf or all -inf logits.
    """
    with target.lock, target.without_gradients():
        batch = _Batch(target, drafter, rule, request)
        batch.prefill()
        while batch.active:
            tree = batch.draft()
            logits, features = batch.verify(tree)
            verdict = batch.apply_rule(tree, logits)
            batch.observe(tree, logits, verdict)
            batch.commit_cache(verdict)
            batch.advance(verdict, features)
        return batch.outcome()


class _Batch:
    """The rows being decoded. ``lengths`` [B] is what of each text the target has read; the root comes after.

    Texts, lengths, verdicts and budgets are on the CPU, what models make is on their device. A round waits for the
    device where the rule's verdict comes from there, and nowhere else (but for stopping criteria, processors that look
    at the text, and log-likelihoods, where a request has them, and for drafters that do: once for merging trees where
    one of them is a head's or a small LM's, once for recycling, and for ``stop_below``).
    """

    def __init__(self, target: Target, drafter: Drafter, rule: Rule | Sequence[Rule], request: Request) -> None:
        count = len(request.prompts)
        self.all_rules = [rule] * count if isinstance(rule, Rule) else list(rule)  # of the request's rows
        if len(self.all_rules) != count:
            raise FsdError(f"{len(self.all_rules)} rules for {count} prompts: give one rule, or one per prompt.")
        self.rules = list(self.all_rules)  # of the rows that are still being decoded
        self.limits = check_prompts(target, request.prompts, request.max_new_tokens)
        tilt = sum(rule.tilt(request.greedy) for rule in self.rules) / count
        drafter = drafter.for_batch(count, tilt)
        self.target, self.drafter, self.request = target, drafter, request
        self.processors = TreeProcessors(request.processors, count)
        self.device = target.device
        longest = max(len(prompt) + limit for prompt, limit in zip(request.prompts, self.limits, strict=True))
        self.capacity = longest + drafter.max_nodes
        # Rows that emitted less are padded to the row that emitted most: after the longest text, by a round's depth.
        reach = longest + 1 + drafter.max_depth
        self.cache_bytes = target.cache_bytes(count, self.capacity) + drafter.cache_bytes(count, reach)
        held = target.held_bytes + drafter.held_bytes
        check_caches(self.cache_bytes, count, self.capacity, self.device, request.max_cache_bytes, held)
        self.cache = target.new_cache(count, self.capacity)
        self.lengths = torch.tensor([len(prompt) for prompt in request.prompts])
        self.rows = list(range(count))  # which request row each batch row is
        self.records = [RowRecord() for _ in range(count)]
        markers = markers_of(self.rules, target.tokenizer)
        self.texts = Texts([record.tokens for record in self.records], request.prompts, self.device, markers)
        budgets = [math.inf if rule.budget is None else rule.budget for rule in self.rules]
        self.budget = torch.tensor(budgets, dtype=torch.float64)  # nats left per row
        self.overspent = torch.zeros(count, device=self.device)  # nats per row beyond what learned prices allow
        process = self.processors.context_free if self.processors else None
        first = torch.tensor([prompt[0] for prompt in request.prompts])
        self.choice = None
        if drafter.choice is not None:
            recorded = None if target.graphs is None else TOKENS
            learns = request.generator is None and not target.is_shared_out  # else trees follow from the text alone
            names = {rule.name for rule in self.rules}
            law = Law(tilt, names.pop() if len(names) == 1 else "several", drafter.samples and not request.greedy)
            self.choice = drafter.choice.begin(count, law, drafter.max_nodes, recorded, learns)
        session = drafter.start(
            first,
            DraftRequest(count, reach, request.greedy, process, request.generator, self.device, tilt, self.choice),
        )
        self.session = session if self.choice is None else LearningSession(session, self.choice)
        self.roots = first
        self.clock = clock_of(self.device)
        self.prefill_seconds = 0.0
        self.known_tokens = 0  # of the prompts, that an earlier request had read
        self.phases_shown: list[dict[str, float]] = [{} for _ in range(count)]
        self.features_read: list[list[Tensor]] = [[] for _ in range(count)]  # of the request's rows, if they are kept

    @property
    def active(self) -> bool:
        return bool(self.rows)

    def prefill(self) -> None:
        """Read the prompts, emit each row's first token, hand the prompts' features to the drafter."""
        prompts = self.request.prompts
        longest = max(len(prompt) for prompt in prompts)
        tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
        ends = (self.lengths - 1)[:, None]
        known = [self._known(prompt) for prompt in prompts]
        features, logits = read_prompts(self.target, self.cache, tokens, self.lengths, known)
        self._keep_features(features, self.lengths)
        tree = DraftTree.root_only(to_device(tokens.gather(1, ends)[:, 0], self.device), logits.shape[-1])
        verdict = self._verdict(tree, logits)
        if self.request.on_round is not None:
            self.clock.lap("prefill")
        self._emit(tree, verdict, logits)
        self.session.observe(tree, logits, verdict.path, verdict.tokens, verdict.accepted)
        # The drafter reads pairs (feature of token i, token i+1): the prompt shifted by one, then the first new token.
        following = torch.cat([tokens[:, 1:], tokens[:, :1]], 1).scatter(1, ends, verdict.tokens[:, :1])
        self._advance(following, features, self.lengths, roots=verdict.tokens[:, 0])
        self.clock.lap("prefill")
        self.prefill_seconds = self.clock.seconds

    def draft(self) -> DraftTree:
        tree = self.session.draft(self.roots)
        self.clock.lap("draft")
        return tree

    def verify(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """One target forward over all nodes: logits [B, N, V] in its own dtype, features [B, N, H]."""
        slots = to_device(self.lengths[:, None] + torch.arange(tree.tokens.shape[1]), self.device)
        positions = slots[:, :1] + tree.depths
        visible = visible_slots(self.lengths, tree.ancestors)
        limit = self.target.max_positions
        if limit is not None:  # nodes beyond the context exist only where the answer ends before they matter
            positions = positions.clamp_max(limit - 1)
        self.cache.set_write_slots(slots, int(self.lengths[0]) if len(self.rows) == 1 else None, visible.shape[-1])
        logits, features = self.target.forward(tree.tokens, positions, visible, self.cache)
        self.clock.lap("target")
        return logits, features

    def apply_rule(self, tree: DraftTree, logits: Tensor) -> Verdict:
        """Let each row's rule choose; emit what it accepted."""
        verdict = self._verdict(tree, logits)
        if self.request.on_round is not None:
            self.clock.lap("rule")
        for row in self.rows:
            self.records[row].target_forwards += 1
        self._emit(tree, verdict, logits)
        self.clock.lap("rule")
        return verdict

    def observe(self, tree: DraftTree, logits: Tensor, verdict: Verdict) -> None:
        """Show the drafter the target's logits at its tree's nodes."""
        self.session.observe(tree, logits, verdict.path, verdict.tokens, verdict.accepted)
        self.clock.lap("draft")

    def commit_cache(self, verdict: Verdict) -> None:
        """Move the accepted path's keys and values to where the text ends. The root is in place already."""
        path, accepted = verdict.path.tolist(), verdict.accepted.tolist()
        if any(row[step] != step for row, count in zip(path, accepted) for step in range(1, count + 1)):
            steps = torch.arange(1, verdict.path.shape[1])
            destinations = self.lengths[:, None] + steps
            sources = self.lengths[:, None] + verdict.path[:, 1:]
            sources = torch.where(steps <= verdict.accepted[:, None], sources, destinations)
            self.cache.move(to_device(sources, self.device), to_device(destinations, self.device))
        self.clock.lap("cache")

    def advance(self, verdict: Verdict, features: Tensor) -> None:
        """Lengthen each text by its accepted path, and give the drafter the new tokens with their features."""
        counts = verdict.accepted + 1
        self.lengths = self.lengths + counts
        left = (self.budget - verdict.spent.sum(1)).clamp_min(0.0)
        self.budget = torch.where(self.budget.isinf(), self.budget, left)  # infinite costs come out of infinite budgets
        path = to_device(verdict.path, self.device)
        path_features = at_nodes(features, path)
        self._keep_features(path_features, counts)
        roots = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        self._advance(verdict.tokens, path_features, counts, roots)
        self.clock.lap("draft")

    def outcome(self) -> Outcome:
        seconds = self.clock.seconds  # the answers are complete: before a device is waited for
        stats = GenerationStats(
            rows=[
                record.finish(self.prefill_seconds, prompt, self.drafter.proposers)
                for record, prompt in zip(self.records, self.request.prompts, strict=True)
            ],
            rule=_described(self.all_rules),
            drafter=self.drafter.describe() | ({} if self.choice is None else {"tree": AUTO}),
            seconds=seconds,
            prefill_seconds=self.prefill_seconds,
            known_tokens=self.known_tokens,
            phases=self.clock.phases(),
            cache_bytes=self.cache_bytes,
            trees=None if self.choice is None else self.choice.trees,
        )
        return Outcome([record.tokens for record in self.records], self.records, stats)

    # parts -----------------------------------------------------------------------------------------------------------

    def _verdict(self, tree: DraftTree, logits: Tensor) -> Verdict:
        texts = [self._text(row)[:-1] for row in self.rows] if self.processors.contextual else []
        processors = self.processors
        if processors:  # in fp32, as in generate; rules convert what they look at
            logits = logits.float()

        def process_draft(drafted: DraftTree) -> Tensor:
            return processors.drafts(drafted, logits.shape[-1], texts, self.rows)

        round = Verification(
            tree=tree,
            logits=logits,
            scores=processors.nodes(logits, tree, texts, self.rows),
            greedy=self.request.greedy,
            uniforms=torch.rand(*tree.tokens.shape, 3, generator=self.request.generator, device=self.device),
            budget_left=self.budget,
            process_draft=process_draft if processors else None,
            texts=self.texts,
            overspent=self.overspent,
        )
        verdict = apply_rules(self.rules, round)
        if verdict.allowed is not None:
            spent = to_device(verdict.spent.sum(1).float(), self.device)
            self.overspent = (self.overspent + spent - verdict.allowed).clamp_min(-FIRST_PRICE)  # nothing is saved up
        return verdict

    def _emit(self, tree: DraftTree, verdict: Verdict, logits: Tensor) -> None:
        """Append each row's new tokens, up to and including the first that ends its answer."""
        tokens, counts, path = verdict.tokens.tolist(), (verdict.accepted + 1).tolist(), verdict.path.tolist()
        sources, gates, spent = verdict.sources.tolist(), verdict.gate_open.tolist(), verdict.spent.tolist()
        first, regret = verdict.first.tolist(), verdict.regret.tolist()
        log_p = _log_likelihoods(verdict, logits) if self.request.measure_log_likelihood else None
        elapsed = self.clock.seconds - self.prefill_seconds
        for index, row in enumerate(self.rows):
            record, start = self.records[row], len(self.records[row].tokens)
            for token in tokens[index][: counts[index]]:
                record.tokens.append(token)
                record.finish_reason = self._finish_reason(row, token)
                if record.finish_reason:
                    break
            new = len(record.tokens) - start
            record.sources += sources[index][:new]
            record.gates += gates[index][:new]
            record.spent += spent[index][:new]
            proposer = (lambda node: 0) if tree.rows is None else tree.rows[index].proposer
            record.proposers += [*map(proposer, path[index][1 : counts[index]]), -1][:new]
            drafted = zip(range(1, new + 1), first[index], regret[index])
            record.drafts += [(proposer(node), depth, nats) for depth, node, nats in drafted if node >= 0]
            if log_p is not None:
                record.log_likelihoods += log_p[index][:new]
            record.decode_seconds = elapsed if self.prefill_seconds else 0.0
            if self.request.on_round is not None:
                self.request.on_round(row, self._round(index, tree, verdict, logits, record.tokens[start:]))
            if self.request.on_tokens is not None and self.request.on_tokens(row, record.tokens[start:]):
                record.finish_reason = record.finish_reason or "stop"

    def _round(self, index: int, tree: DraftTree, verdict: Verdict, logits: Tensor, tokens: list[int]) -> Round:
        """What happened to one row of the batch."""
        nodes = [node for node in range(tree.tokens.shape[1]) if node not in tree.padding[index]]
        proposer = (lambda node: 0) if tree.rows is None else tree.rows[index].proposer
        phases = self.clock.phases()
        known, self.phases_shown[index] = self.phases_shown[index], phases
        return Round(
            nodes=tree.tokens[index, nodes].tolist(),
            parents=tree.parents[index, nodes].tolist(),
            proposers=[proposer(node) for node in nodes],
            q_index=tree.q_index[index, nodes].tolist(),
            q_logits=tree.q_logits[index],
            draft_ids=tree.draft_ids,
            logits=logits[index],
            path=verdict.path[index].tolist(),
            tokens=tokens,
            sources=verdict.sources[index, : len(tokens)].tolist(),
            spent=verdict.spent[index, : len(tokens)].tolist(),
            seconds={name: seconds - known.get(name, 0.0) for name, seconds in phases.items()},
        )

    def _finish_reason(self, row: int, token: int) -> str | None:
        """Why the answer ends with its newest token, or None."""
        if token in self.request.eos_token_ids:
            return "stop"
        if self.request.criteria:
            text = to_device(self._text(row)[None], self.device)
            if bool(self.request.criteria(text, None)[0]):
                return "stop"
        return "length" if len(self.records[row].tokens) >= self.limits[row] else None

    def _known(self, prompt: list[int]) -> Prefix | None:
        """The start of a prompt that an earlier request read, where such are kept."""
        prefixes = self.target.prefixes
        known = None if prefixes is None else prefixes.find(prompt, self.target.watched)
        self.known_tokens += 0 if known is None else len(known.tokens)
        return known

    def _keep_features(self, features: Tensor, counts: Tensor) -> None:
        """The target's features [B, K, F] of the texts' next tokens, the first ``counts`` [B] of each row."""
        if self.target.prefixes is not None:
            for index, row in enumerate(self.rows):
                self.features_read[row].append(features[index, : int(counts[index])])

    def _keep_texts(self, ended: set[int]) -> None:
        """Keep what was read of these rows of the batch for later requests, if any are kept."""
        prefixes = self.target.prefixes
        if prefixes is None:
            return
        for index in sorted(ended):
            row = self.rows[index]
            text = torch.tensor([*self.request.prompts[row], *self.records[row].tokens])
            count = min(int(self.lengths[index]), len(text))  # the last round may have read on after the answer's end
            features = torch.cat(self.features_read[row])[:count]
            states = self.cache.saved(index, count)
            prefixes.store(Prefix(text[:count], states, features, self.target.watched))
            self.features_read[row] = []

    def _text(self, row: int) -> Tensor:
        """The row's text as ``generate`` would show it to processors and criteria, [T] on the CPU."""
        prompts = self.request.padded_prompts or self.request.prompts
        return torch.tensor([*prompts[row], *self.records[row].tokens])

    def _advance(self, tokens: Tensor, features: Tensor, counts: Tensor, roots: Tensor) -> None:
        """Drop rows whose answer ended, then show the drafter the rest's new tokens [B, K] with their features."""
        self.roots = roots
        going = [i for i, row in enumerate(self.rows) if self.records[row].finish_reason is None]
        if len(going) < len(self.rows):
            self._keep_texts(set(range(len(self.rows))) - set(going))
            self.rows = [self.rows[i] for i in going]
            self.rules = [self.rules[i] for i in going]
            if not going:
                return
            index = torch.tensor(going)
            tokens, counts, self.roots, self.lengths = (x[index] for x in (tokens, counts, roots, self.lengths))
            features = features.index_select(0, to_device(index, self.device))
            self.budget = self.budget[index]
            self.overspent = self.overspent[to_device(index, self.device)]
            self.texts.select(going)
            self.cache.select(index)
            self.session.select(index)
        longest = int(counts.max())
        self.session.extend(tokens[:, :longest], features[:, :longest], counts)


def _described(rules: Sequence[Rule]) -> dict[str, object]:
    """One rule for all rows, or all of them."""
    if all(rule == rules[0] for rule in rules):
        return rules[0].describe()
    return {"rule": "per row", "rows": [rule.describe() for rule in rules]}


def _log_likelihoods(verdict: Verdict, logits: Tensor) -> list[list[float]]:
    """The target's raw log-probability of each emitted token, [B][D+1]."""
    path, tokens = to_device(verdict.path, logits.device), to_device(verdict.tokens, logits.device)
    return at_nodes(logits, path).float().log_softmax(-1).gather(2, tokens[..., None])[..., 0].tolist()
