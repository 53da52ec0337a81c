"""The rounds of speculative beams: draft the next beams, read the forest in one forward, take the steps it allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fsd_infer.beams.forest import Begun, Forest, Node, lay_out
from fsd_infer.beams.options import BeamOptions
from fsd_infer.beams.plan import Planner, most_nodes
from fsd_infer.beams.proposers import needs_features, proposer_of
from fsd_infer.beams.sampling import Draw, draw
from fsd_infer.beams.search import Beam, Hypothesis, Search, Terms
from fsd_infer.beams.width import chances_of_width, dynamic_width, guesses_of
from fsd_infer.cpu import ops
from fsd_infer.device.clock import clock_of
from fsd_infer.device.memory import check_caches
from fsd_infer.device.rows import padded
from fsd_infer.device.transfer import lists, to_device
from fsd_infer.drafters.base import Drafter, NoDrafter
from fsd_infer.drafters.shape import of_device
from fsd_infer.engine import Request
from fsd_infer.engine.stats import GenerationStats, RowRecord
from fsd_infer.errors import FsdError, NonFiniteLogitsError
from fsd_infer.request.processors import TreeProcessors
from fsd_infer.request.prompts import check_prompts, read_prompts
from fsd_infer.targets.target import Target

# A CPU pays for every node, a GPU hardly. Measured on training prompts with 2 and 4 beams of smollm2-135m.
DEFAULTS = {"cpu": BeamOptions(depth=4, spread=1.0, nodes=8), "cuda": BeamOptions(depth=6, spread=3.0)}
SUCCESSORS = 64  # of a node, looked at where beams are sampled; others are drawn only if one of them arrives
# Processors that leave log-probabilities at most 0. Others, and custom ones, may lift them.
_NEVER_LIFT = {
    *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper"),
    *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization"),
    *("SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor", "NoBadWordsLogitsProcessor"),
    *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "NoRepeatNGramLogitsProcessor"),
    *("RepetitionPenaltyLogitsProcessor", "PrefixConstrainedLogitsProcessor"),
    *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor"),
}


@dataclass
class BeamRequest:
    """A batch to decode with beams.

    Attributes:
        request: see there. ``on_tokens``, ``on_end`` and ``generator``'s device do not matter here.
        beams: W.
        length_penalty, early_stopping: as in ``GenerationConfig``.
        options: see there.
    """

    request: Request
    beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    options: BeamOptions = field(default_factory=BeamOptions)


@dataclass
class BeamOutcome:
    """The up to W best answers of each prompt, best first, and statistics with a row per prompt, of its best answer."""

    answers: list[list[Hypothesis]]
    records: list[RowRecord]
    stats: GenerationStats


@torch.inference_mode()
def search_beams(target: Target, drafter: Drafter, asked: BeamRequest) -> BeamOutcome:
    """Beam search, or with ``greedy`` off beam sampling, as transformers' ``generate`` does it.

    Raises:
        FsdError: options that do not go together, a drafter that cannot draft for beams, and what
            :func:`fsd_infer.request.prompts.check_prompts` refuses.
        ContextLengthError: a prompt that leaves no room in the target's context.
        CacheMemoryError: key-value caches that take more memory than is free or allowed; none is allocated then.
        NonFiniteLogitsError: NaN or +inf among the target's processed log-probabilities.
    """
    beams = _Beams(target, drafter, asked)
    beams.prefill()
    while beams.searches:
        nodes = beams.draft()
        beams.read(nodes)
        beams.advance()
    return beams.outcome()


class _Beams:
    """The searches of a batch. Trees, texts and scores are on the CPU, what models make is on their device."""

    def __init__(self, target: Target, drafter: Drafter, asked: BeamRequest) -> None:
        request, self.beams = asked.request, asked.beams
        limits = check_prompts(target, request.prompts, request.max_new_tokens)
        self.target, self.drafter, self.request = target, drafter, request
        self.device = target.device
        self.sampled = not request.greedy
        self.options = _filled(asked, drafter, self.device)
        self.processors = TreeProcessors(request.processors, len(request.prompts))
        names = {type(processor).__name__ for processor in self.processors.processors}
        self.terms = Terms(
            beams=asked.beams,
            eos_token_ids=request.eos_token_ids,
            length_penalty=asked.length_penalty,
            early_stopping=asked.early_stopping,
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
        """Forests and caches, or CacheMemoryError."""
        prompts, options, request = self.request.prompts, self.options, self.request
        # the nodes of a round beside those that are left of the last, and the spare slot
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
            self.cache_bytes += count * slots * width * (2 + len(self.target.watched)) * element
        held = self.target.held_bytes + self.drafter.held_bytes
        check_caches(self.cache_bytes, count, slots, self.device, request.max_cache_bytes, held)
        self.cache = self.target.new_cache(count, slots)
        seed = int(torch.randint(2**62, (), generator=request.generator, device=_where(request.generator)))
        forests = [Forest(prompt, slots, seed + row) for row, prompt in enumerate(prompts)]
        self.begun = Begun(forests, slots, padded(prompts), torch.tensor([len(prompt) for prompt in prompts]))
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
        """One forward of the target over these nodes, [B] rows, at least one in each."""
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
        """Take every step that can be taken; put answers that are complete aside."""
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

    def outcome(self) -> BeamOutcome:
        seconds = self.clock.seconds
        stats = GenerationStats(
            rows=[
                record.finish(self.prefill_seconds, prompt, self.drafter.proposers)
                for record, prompt in zip(self.records, self.request.prompts, strict=True)
            ],
            rule={"rule": "beams", "beams": self.beams, "sampled": self.sampled},
            drafter=self.drafter.describe(),
            seconds=seconds,
            prefill_seconds=self.prefill_seconds,
            phases=self.clock.phases(),
            cache_bytes=self.cache_bytes,
        )
        return BeamOutcome(self.answers, self.records, stats)

    # parts -----------------------------------------------------------------------------------------------------------

    def _take(self, nodes: Sequence[Sequence[Node]], logits: Tensor) -> None:
        """Note where the target's logits [B, M, V] at these nodes lie. Where no processor reads the text, look at all
        at once; but on a CPU with processors only where the search does: there their work costs more than a wait.
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
        """Fill in ``likely`` and ``rest`` of nodes that the target has read, [B] rows, each at one depth."""
        for search, wanted in zip(self.searches, nodes, strict=True):
            self._look_at(search.row, wanted)

    def _look_at(self, row: int, nodes: Sequence[Node]) -> None:
        """:meth:`look` at nodes of one prompt, by its number in the request."""
        unseen = [node for node in nodes if node.likely is None]
        if unseen:
            self._fill([row], [unseen], *self._largest(self._processed(row, unseen)[None]))

    def _largest(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Processed log-probabilities [B, M, V] -> values, tokens and rests as in :meth:`_fill`."""
        values, tokens = scores.topk(self.successors)
        return values, tokens, scores.double().exp().sum(-1) - values.double().exp().sum(-1)

    @staticmethod
    def _fill(
        prompts: Sequence[int], nodes: Sequence[Sequence[Node]], values: Tensor, tokens: Tensor, rests: Tensor
    ) -> None:
        """Log-probabilities, falling, and tokens of likely successors, both [B, M, C], and the rest's sums [B, M]."""
        count = values.shape[-1]
        for row, (of_values, of_tokens, of_rests) in enumerate(
            zip(*lists(values.flatten(1), tokens.flatten(1), rests), strict=True)
        ):
            for place, node in enumerate(nodes[row]):
                part = slice(place * count, (place + 1) * count)
                known, ids = of_values[part], of_tokens[part]
                if not known[0] < math.inf:  # NaN counts as the largest number
                    raise NonFiniteLogitsError(
                        f"the target's log-probabilities in row {prompts[row]} are NaN or +inf. Check its weights "
                        "and dtype (fp16 overflows; bf16 or fp32 do not), and the request's logits processors."
                    )
                while known and known[-1] == -math.inf:
                    known.pop()
                node.likely, node.rest = (known, ids[: len(known)]), max(of_rests[place], 0.0)

    def _processed(self, row: int, nodes: Sequence[Node]) -> Tensor:
        """The target's processed log-probabilities [M, V], fp32, at nodes of one depth of a request's row."""
        logits = torch.stack([node.logits[0][node.logits[1]] for node in nodes if node.logits is not None])
        scores = logits.float().log_softmax(-1)
        if not self.processors:
            return scores
        if not self.processors.contextual:
            return self.processors.context_free(scores)
        return self.processors.texts(scores, self._texts(row, [node.text() for node in nodes]), row)

    def _texts(self, row: int, texts: Sequence[Sequence[int]]) -> Tensor:
        """[M, T] a prompt with M texts of one length after it, as ``generate`` shows them."""
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
        """The dynamic width of a step, see :mod:`fsd_infer.beams.width`."""
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
        """Keep the answers of searches that are done, and their rows no longer."""
        going = [place for place, search in enumerate(self.searches) if not search.done]
        if len(going) == len(self.searches):
            return
        for search in self.searches:
            if search.done:
                self._record(search)
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


def _filled(asked: BeamRequest, drafter: Drafter, device: torch.device) -> BeamOptions:
    """With the defaults of the device where nothing was given. Raises FsdError for options that mean nothing here."""
    options, default = asked.options, of_device(DEFAULTS, device)
    depth = default.depth if options.depth is None else options.depth
    depth = 0 if isinstance(drafter, NoDrafter) else depth
    if asked.request.greedy and (options.confidence is not None or options.join_every is not None):
        raise FsdError(
            "confidence and join_every change which beams go on, and beam search is transformers' to the token: sample "
            "(do_sample=True, or a temperature above 0), or leave them out."
        )
    if options.confidence is not None and not depth:
        raise FsdError("confidence compares the target with a drafter, and nothing is drafted: leave it out.")
    if (options.min_width or 1) > asked.beams:
        raise FsdError(f"min_width {options.min_width} is more than the {asked.beams} beams: lower it.")
    nodes = default.nodes if options.given().keys().isdisjoint(("depth", "spread", "nodes")) else options.nodes
    spread = default.spread if options.spread is None else options.spread
    return replace(options, depth=depth, spread=spread, nodes=nodes)


def _kept_nodes(beams: int, limit: int, join_every: int | None) -> int:
    """Slots for the new tokens of all live beams."""
    if join_every is None or join_every >= limit:
        return beams * limit
    return limit + beams * join_every


def _where(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def _between(before: Node, now: Node) -> list[Node]:
    """The nodes after one up to and including another below it."""
    found: list[Node] = []
    while now is not before:
        found.append(now)
        assert now.parent is not None
        now = now.parent
    return found[::-1]
