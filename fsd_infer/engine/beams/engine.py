"""The rounds of speculative beams: draft the next beams, read the forest in one forward, take all possible steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig

from fsd_infer.cpu import ops
from fsd_infer.device.clock import clock_of
from fsd_infer.device.memory import check_caches
from fsd_infer.device.rows import padded
from fsd_infer.device.transfer import lists, to_device
from fsd_infer.drafters.base import Drafter
from fsd_infer.engine import Outcome, Request
from fsd_infer.engine.beams.forest import Begun, Forest, Node, lay_out
from fsd_infer.engine.beams.options import BeamOptions, check_beam_request, filled
from fsd_infer.engine.beams.plan import Planner, most_nodes
from fsd_infer.engine.beams.proposers import needs_features, proposer_of
from fsd_infer.engine.beams.sampling import Draw, draw
from fsd_infer.engine.beams.search import Beam, Hypothesis, Search, Terms
from fsd_infer.engine.beams.width import chances_of_width, dynamic_width, guesses_of
from fsd_infer.engine.stats import GenerationStats, RowRecord
from fsd_infer.errors import NonFiniteLogitsError
from fsd_infer.request.processors import TreeProcessors
from fsd_infer.request.prompts import check_prompts, read_prompts
from fsd_infer.rules import Rule
from fsd_infer.targets.target import Target

NO_ANSWER = -1e9  # score of an answer that a search did not find, as in transformers
SUCCESSORS = 64  # listed successors of a node in beam sampling; others are drawn only if one of them arrives
# Processors that keep log-probabilities at most 0. Others, and custom ones, may raise them.
_NEVER_LIFT = {
    *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper"),
    *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization"),
    *("SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor", "NoBadWordsLogitsProcessor"),
    *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "NoRepeatNGramLogitsProcessor"),
    *("RepetitionPenaltyLogitsProcessor", "PrefixConstrainedLogitsProcessor"),
    *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor"),
}


@torch.inference_mode()
def decode_beams(
    target: Target,
    drafter: Drafter,
    rules: Sequence[Rule],
    request: Request,
    config: GenerationConfig,
    options: BeamOptions | None = None,
) -> Outcome:
    """Decode with beam search, or above temperature 0 with beam sampling, as transformers' ``generate`` does.

    Args:
        target: the target.
        drafter: of a kind that :func:`proposer_of` knows.
        rules: `exact` for every prompt.
        request: see there; ``on_round`` has no meaning with beams.
        config: with ``num_beams``, ``num_return_sequences``, ``length_penalty`` and ``early_stopping``.
        options: how beams are drafted.

    Returns:
        the best ``num_return_sequences`` answers of each prompt with their scores. If a search finds fewer, because
        its processors allow no more, the others are empty.

    Raises:
        FsdError: another rule, a streamer, incompatible options, a drafter that cannot draft for beams, and errors of
            :func:`fsd_infer.request.prompts.check_prompts`.
        ContextLengthError: a prompt that leaves no room in the target's context.
        CacheMemoryError: KV caches that exceed the free or allowed memory; nothing is allocated then.
        NonFiniteLogitsError: NaN or +inf among the target's processed log-probabilities.
    """
    check_beam_request(rules, request)
    beams = _Beams(target, drafter, request, config, options or BeamOptions())
    beams.prefill()
    while beams.searches:
        nodes = beams.draft()
        beams.read(nodes)
        beams.advance()
    return beams.outcome(config.num_return_sequences or 1)


class _Beams:
    """The searches of a batch. Trees, texts and scores are on the CPU, the models' outputs on their device."""

    def __init__(
        self, target: Target, drafter: Drafter, request: Request, config: GenerationConfig, options: BeamOptions
    ) -> None:
        self.beams = config.num_beams or 1
        limits = check_prompts(target, request.prompts, request.max_new_tokens)
        self.target, self.drafter, self.request = target, drafter, request
        self.device = target.device
        self.sampled = not request.greedy
        self.options = filled(options, request, self.beams, drafter, self.device)
        self.processors = TreeProcessors(request.processors, len(request.prompts))
        names = {type(processor).__name__ for processor in self.processors.processors}
        self.terms = Terms(
            beams=self.beams,
            eos_token_ids=request.eos_token_ids,
            length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
            early_stopping=False if config.early_stopping is None else config.early_stopping,
            stops=self._stops if request.criteria else None,
            bounded=names <= _NEVER_LIFT,
            draw=self._draw if self.sampled else None,
            width=None if self.options.confidence is None else self._width,
            join_every=self.options.join_every,
        )
        self.successors = min(
            target.vocab_size, SUCCESSORS if self.sampled else self.terms.candidates * self.terms.beams
        )
        self.clock = clock_of(self.device)
        self._allocate(limits)
        self.records = [RowRecord() for _ in request.prompts]
        self.answers: list[list[Hypothesis]] = [[] for _ in request.prompts]
        self.prefill_seconds = 0.0

    def _allocate(self, limits: Sequence[int]) -> None:
        """Allocate forests and caches. Raises CacheMemoryError."""
        prompts, options, request = self.request.prompts, self.options, self.request
        # the nodes of this round and of the last, and the spare slot
        extra = 2 * (most_nodes(options, self.beams) + self.beams) + 1
        slots = extra + max(
            len(prompt) + _kept_nodes(self.beams, limit, options.join_every)
            for prompt, limit in zip(prompts, limits, strict=True)
        )
        count = len(prompts)
        self.cache_bytes = self.target.cache_bytes(count, slots) + self.drafter.cache_bytes(count, slots)
        if needs_features(self.drafter):  # the target's, and the head's own
            width = self.target.hidden_size
            element = torch.empty((), dtype=self.target.dtype).element_size()
            self.cache_bytes += count * slots * width * (2 + len(self.target.captured_layers)) * element
        held = self.target.held_bytes + self.drafter.held_bytes
        check_caches(self.cache_bytes, count, slots, self.device, request.max_cache_bytes, held)
        self.cache = self.target.new_cache(count, slots)
        seed = int(torch.randint(2**62, (), generator=request.generator, device=_where(request.generator)))
        forests = [Forest(prompt, slots, seed + row) for row, prompt in enumerate(prompts)]
        keys: Sequence[str | None] = request.cache_keys or [None] * count
        if request.generator is not None:  # with a seed, a text drafts from itself alone
            keys = [""] * count
        self.begun = Begun(forests, slots, padded(prompts), torch.tensor([len(prompt) for prompt in prompts]), keys)
        self.searches = [
            Search(self.terms, forest, limit, row)
            for row, (forest, limit) in enumerate(zip(forests, limits, strict=True))
        ]

    # a round ---------------------------------------------------------------------------------------------------------

    def prefill(self) -> None:
        """Read the prompts, and take the first step of each search."""
        begun = self.begun
        features, logits = read_prompts(self.target, self.cache, begun.tokens, begun.lengths)
        if needs_features(self.drafter):
            begun.features = features.new_zeros(len(features), begun.slots, features.shape[-1])
            begun.features[:, : features.shape[1]] = features
        self.proposer = proposer_of(self.drafter, begun)
        self.planner = Planner(self.terms, self.options, self.proposer, self.look, self.successors)
        self._take([[forest.root] for forest in begun.forests], logits)
        self.clock.lap("prefill")
        self.advance()
        self.prefill_seconds = self.clock.seconds

    def draft(self) -> list[list[Node]]:
        nodes = self.planner.plan(self.searches)
        self.clock.lap("draft")
        return nodes

    def read(self, nodes: Sequence[Sequence[Node]]) -> None:
        """Run the target over these nodes, [B] rows, at least one node in each."""
        layout = lay_out(self.begun.forests, nodes, self.device)
        self.cache.set_write_slots(layout.slots, layout.start, layout.visible.shape[-1], layout.at)
        logits, features = self.target.forward(layout.tokens, layout.positions, layout.visible, self.cache)
        if self.begun.features is not None:
            self.begun.features.scatter_(1, layout.slots[..., None].expand_as(features), features)
        self._take(nodes, logits)
        for search in self.searches:
            self.records[search.row].target_forwards += 1
        self.clock.lap("target")

    def advance(self) -> None:
        """Take all possible steps, and drop finished searches."""
        grown: list[list[Node]] = []
        for search in self.searches:
            before = search.forest.shared
            while not search.done:
                self._look_at(search.row, [beam.node for beam in search.live if beam.node.logits is not None])
                if not search.step():
                    break
            grown.append(_between(before, search.forest.shared))
        self.proposer.extend(grown)
        self._put_aside()
        self.clock.lap("search")

    def outcome(self, count: int) -> Outcome:
        """Return the best ``count`` answers of each prompt; statistics and records are of the best."""
        seconds = self.clock.seconds
        rows = [
            record.finish(self.prefill_seconds, prompt, self.drafter.proposers)
            for record, prompt in zip(self.records, self.request.prompts, strict=True)
        ]
        if self.request.measure_log_likelihood:
            for row, answers in zip(rows, self.answers, strict=True):
                if answers:
                    row.mean_log_likelihood = answers[0].score * row.new_tokens ** (self.terms.length_penalty - 1.0)
        stats = GenerationStats(
            rows=rows,
            rule={"rule": "beams", "beams": self.beams, "sampled": self.sampled},
            drafter=self.drafter.describe(),
            seconds=seconds,
            prefill_seconds=self.prefill_seconds,
            phases=self.clock.phases(),
            cache_bytes=self.cache_bytes,
        )
        best = [(answers + [Hypothesis(NO_ANSWER, [], False)] * count)[:count] for answers in self.answers]
        flat = [answer for answers in best for answer in answers]
        return Outcome([answer.tokens for answer in flat], self.records, stats, [answer.score for answer in flat])

    # parts -----------------------------------------------------------------------------------------------------------

    def _take(self, nodes: Sequence[Sequence[Node]], logits: Tensor) -> None:
        """Attach the target's logits [B, M, V] to these nodes.

        Unless a processor reads the text, also list the successors of all nodes at once. On a CPU with processors the
        search lists them on demand, since processing all nodes costs more than a sync.
        """
        for row, wanted in enumerate(nodes):
            for place, node in enumerate(wanted):
                node.logits = logits[row], place
        if not self.processors:
            values, tokens = ops.likeliest(logits, self.successors)
            rests = 1.0 - values.double().exp().sum(-1) if self.sampled else torch.zeros_like(values[..., 0])
            self._fill([search.row for search in self.searches], nodes, values, tokens, rests)
        elif not self.processors.contextual and self.device.type != "cpu":
            scores = self.processors.context_free(logits.float().log_softmax(-1))
            self._fill([search.row for search in self.searches], nodes, *self._largest(scores))
        self.proposer.observe(nodes)

    def look(self, nodes: Sequence[Sequence[Node]]) -> None:
        """Set ``likely`` and ``rest`` of nodes that the target has read, [B] rows, each at one depth."""
        for search, wanted in zip(self.searches, nodes, strict=True):
            self._look_at(search.row, wanted)

    def _look_at(self, row: int, nodes: Sequence[Node]) -> None:
        """:meth:`look` at nodes of one prompt, given by its index in the request."""
        unseen = [node for node in nodes if node.likely is None]
        if unseen:
            self._fill([row], [unseen], *self._largest(self._processed(row, unseen)[None]))

    def _largest(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return values, tokens and rests, as in :meth:`_fill`, of processed log-probabilities [B, M, V]."""
        values, tokens = scores.topk(self.successors)
        return values, tokens, scores.double().exp().sum(-1) - values.double().exp().sum(-1)

    @staticmethod
    def _fill(
        prompts: Sequence[int], nodes: Sequence[Sequence[Node]], values: Tensor, tokens: Tensor, rests: Tensor
    ) -> None:
        """Set ``likely`` and ``rest`` from log-probabilities (descending) and tokens [B, M, C], and sums [B, M]."""
        count = values.shape[-1]
        for row, (of_values, of_tokens, of_rests) in enumerate(
            zip(*lists(values.flatten(1), tokens.flatten(1), rests), strict=True)
        ):
            for place, node in enumerate(nodes[row]):
                part = slice(place * count, (place + 1) * count)
                known, ids = of_values[part], of_tokens[part]
                if not known[0] < math.inf:  # NaN sorts as the largest number
                    raise NonFiniteLogitsError(
                        f"the target's log-probabilities in row {prompts[row]} are NaN or +inf. Check its weights "
                        "and dtype (fp16 overflows; bf16 or fp32 do not), and the request's logits processors."
                    )
                while known and known[-1] == -math.inf:
                    known.pop()
                node.likely, node.rest = (known, ids[: len(known)]), max(of_rests[place], 0.0)

    def _processed(self, row: int, nodes: Sequence[Node]) -> Tensor:
        """Return the target's processed log-probabilities [M, V], fp32, at nodes of one depth of one prompt."""
        logits = torch.stack([node.logits[0][node.logits[1]] for node in nodes if node.logits is not None])
        scores = logits.float().log_softmax(-1)
        if not self.processors:
            return scores
        if not self.processors.contextual:
            return self.processors.context_free(scores)
        return self.processors.texts(scores, self._texts(row, [node.text() for node in nodes]), row)

    def _texts(self, row: int, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return a prompt followed by each of M texts of one length, [M, T], as ``generate`` would."""
        prompts = self.request.padded_prompts or self.request.prompts
        return to_device(torch.tensor([[*prompts[row], *text] for text in texts]), self.device)

    def _stops(self, row: int, texts: list[list[int]]) -> list[bool]:
        assert self.request.criteria is not None
        stops: Tensor = self.request.criteria(self._texts(row, texts), None)
        return stops.tolist()

    def _draw(self, row: int, live: Sequence[Beam], count: int) -> list[Draw]:
        nodes, scores = [beam.node for beam in live], [beam.score for beam in live]
        return draw(nodes, scores, count, lambda node: self._processed(row, [node])[0].double().exp().cpu())

    def _width(self, live: Sequence[Beam]) -> int:
        """Return the dynamic width of a step, see :mod:`fsd_infer.engine.beams.width`."""
        assert self.options.confidence is not None
        chances = chances_of_width(
            [beam.score for beam in live],
            *guesses_of([beam.node for beam in live]),
            self.beams,
            self.planner.breadth_of(self.beams),
            self.terms.candidates,
            self.terms.eos_token_ids,
        )
        return dynamic_width(chances, self.options.confidence, self.options.min_width or 1)

    def _put_aside(self) -> None:
        """Record the answers of finished searches, and drop their rows."""
        going = [place for place, search in enumerate(self.searches) if not search.done]
        if len(going) == len(self.searches):
            return
        for place, search in enumerate(self.searches):
            if search.done:
                self._record(search)
                self.proposer.finish(place, self.records[search.row].tokens)
        self.searches = [self.searches[place] for place in going]
        if not going:
            return
        rows = torch.tensor(going)
        self.begun.forests[:] = [self.begun.forests[place] for place in going]
        self.cache.select(rows)
        self.proposer.select(rows)
        if self.begun.features is not None:
            self.begun.features = self.begun.features[to_device(rows, self.device)]

    def _record(self, search: Search) -> None:
        record = self.records[search.row]
        self.answers[search.row] = search.finished
        record.steps = search.length
        record.decode_seconds = self.clock.seconds - self.prefill_seconds if self.prefill_seconds else 0.0
        if search.finished:
            record.tokens = search.finished[0].tokens
            record.finish_reason = "stop" if search.finished[0].stopped else "length"


def _kept_nodes(beams: int, limit: int, join_every: int | None) -> int:
    """Return the number of slots for the new tokens of all live beams."""
    if join_every is None or join_every >= limit:
        return beams * limit
    return limit + beams * join_every


def _where(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def _between(before: Node, now: Node) -> list[Node]:
    """Return the nodes below ``before`` on the path to ``now``, which is included."""
    path: list[Node] = []
    while now is not before:
        path.append(now)
        assert now.parent is not None
        now = now.parent
    return path[::-1]
