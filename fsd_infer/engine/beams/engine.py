"""The rounds of speculative beams: draft the next beams, read the forest in one forward, take all possible steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig

from fsd_core import functional
from fsd_core.errors import FsdError, NonFiniteLogitsError
from fsd_core.tensors import at_nodes, lists, padded, to_device
from fsd_infer.device.clock import clock_of
from fsd_infer.device.cores import Team
from fsd_infer.device.memory import check_caches
from fsd_infer.drafters.base import Drafter
from fsd_infer.engine import Outcome, Request
from fsd_infer.engine.beams.forest import Begun, Forest, Node, lay_out
from fsd_infer.engine.beams.options import BeamOptions, check_beam_request, filled
from fsd_infer.engine.beams.proposers import needs_features, proposer_of
from fsd_infer.engine.beams.sampling import Draw, chances_of_width, draw, dynamic_width, guesses_of
from fsd_infer.engine.beams.search import Beam, Hypothesis, Planner, Search, Terms, most_nodes
from fsd_infer.engine.stats import GenerationStats
from fsd_infer.request.processors import TreeProcessors
from fsd_infer.request.prompts import check_prompts, check_sights, read_prompts
from fsd_infer.rules import Rule
from fsd_infer.targets.target import Target

NO_ANSWER = -1e9  # score of an answer that a search did not find, as in transformers
SUCCESSORS = 64  # listed successors of a node in beam sampling; others are drawn only if one of them arrives


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
        FsdError: another rule, a streamer, incompatible options, recurrent layers, a drafter that cannot draft for
            beams, and errors of
            :func:`fsd_infer.request.prompts.check_prompts`.
        ContextLengthError: a prompt that leaves no room in the target's context.
        CacheMemoryError: KV caches that exceed the free or allowed memory; nothing is allocated then.
        NonFiniteLogitsError: NaN or +inf among the target's processed log-probabilities.
    """
    check_beam_request(rules, request)
    with Team(target.device, request.generator is not None) as team:
        beams = _Beams(target, drafter, request, config, options or BeamOptions())
        beams.prefill()
        while beams.searches:
            team.fit()
            nodes = beams.draft()
            beams.advance(nodes, beams.read(nodes))
    return beams.outcome(config.num_return_sequences or 1)


class _Beams:
    """The searches of a batch. Trees, texts and scores are on the CPU, the models' outputs on their device."""

    def __init__(
        self, target: Target, drafter: Drafter, request: Request, config: GenerationConfig, options: BeamOptions
    ) -> None:
        self.beams = config.num_beams or 1
        if target.is_recurrent:
            raise FsdError(
                f"{target.name} has recurrent layers, which keep one state of a text and none of its beams: decode "
                "with num_beams=1, greedily or with do_sample=True."
            )
        limits = check_prompts(target, request.prompts, request.max_new_tokens, target.reads_again)
        check_sights(target, request.sights)
        self.target, self.drafter, self.request = target, drafter, request
        self.device = target.device
        self.sampled = not request.greedy
        self.options = filled(options, request, self.beams, drafter, self.device)
        self.processors = TreeProcessors(request.processors, len(request.prompts))
        self.terms = Terms(
            beams=self.beams,
            eos_token_ids=request.eos_token_ids,
            length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
            early_stopping=False if config.early_stopping is None else config.early_stopping,
            stops=self._stops if request.criteria else None,
            draw=self._draw if self.sampled else None,
            width=None if self.options.confidence is None else self._width,
            join_every=self.options.join_every,
        )
        self.successors = min(
            target.vocab_size, SUCCESSORS if self.sampled else self.terms.candidates * self.terms.beams
        )
        self.clock = clock_of(self.device)
        self._allocate(limits)
        self.prefill_seconds = 0.0

    def _allocate(self, limits: Sequence[int]) -> None:
        """Allocate forests and caches. Raises CacheMemoryError."""
        prompts, options, request = self.request.prompts, self.options, self.request
        # the nodes of this round and of the last, and the spare slot
        extra = 2 * (most_nodes(options, self.beams) + self.beams) + 1
        slots = extra + max(  # joined beams share all but the last tokens
            len(prompt) + min(self.beams * limit, limit + self.beams * (options.join_every or limit))
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
        where = getattr(request.generator, "device", None)
        seed = int(torch.randint(2**62, (), generator=request.generator, device=where))
        forests = [Forest(prompt, slots, seed + row) for row, prompt in enumerate(prompts)]
        keys: Sequence[str | None] = request.cache_keys or [None] * count
        if request.generator is not None:  # with a seed, a text drafts from itself alone
            keys = [""] * count
        self.forests, self.slots, self.keys = forests, slots, keys
        self.all_searches = [
            Search(self.terms, forest, limit, row)
            for row, (forest, limit) in enumerate(zip(forests, limits, strict=True))
        ]
        self.searches = list(self.all_searches)  # the unfinished ones

    # a round ---------------------------------------------------------------------------------------------------------

    def prefill(self) -> None:
        """Read the prompts, and take the first step of each search."""
        prompts = self.request.prompts
        tokens, lengths = padded(prompts), torch.tensor([len(prompt) for prompt in prompts])
        features, logits = read_prompts(self.target, self.cache, tokens, lengths, sights=self.request.sights)
        begun = Begun(self.forests, self.slots, tokens, lengths, self.keys, features)
        self.proposer = proposer_of(self.drafter, begun)
        self.planner = Planner(self.terms, self.options, self.proposer, self.look, self.successors)
        roots = [forest.trunk[:1] for forest in self.forests]
        self._take(roots, logits)
        self.clock.lap("prefill")
        self.advance(roots, at_nodes(features, to_device(lengths - 1, self.device)[:, None]))
        self.prefill_seconds = self.clock.seconds

    def draft(self) -> list[list[Node]]:
        nodes = self.planner.plan(self.searches)
        self.clock.lap("draft")
        return nodes

    def read(self, nodes: Sequence[Sequence[Node]]) -> Tensor:
        """Run the target over these nodes, [B] rows, at least one node in each; return its features [B, M, F]."""
        layout = lay_out(self.forests, nodes, self.device)
        self.cache.set_write_slots(layout.slots, layout.start, layout.visible.shape[-1], layout.at)
        logits, features = self.target.forward(layout.tokens, layout.positions, layout.visible, self.cache)
        self._take(nodes, logits)
        for search in self.searches:
            search.record.target_forwards += 1
        self.clock.lap("target")
        return features

    def advance(self, nodes: Sequence[Sequence[Node]], features: Tensor) -> None:
        """Take all possible steps, tell the proposer what was read, and drop finished searches."""
        grown: list[list[Node]] = []
        for search in self.searches:
            before = len(search.forest.trunk)
            while not search.done:
                self.look(search.row, [beam.node for beam in search.live if beam.node.verified])
                if not search.step():
                    break
            grown.append(search.forest.trunk[before:])
        self.proposer.observe(nodes, features, grown)
        self._put_aside()
        self.clock.lap("search")

    def outcome(self, count: int) -> Outcome:
        """Return the best ``count`` answers of each prompt; statistics and records are of the best."""
        seconds = self.clock.seconds
        rows = []
        for search in self.all_searches:
            row = search.record.finish(self.prefill_seconds, search.forest.prompt, self.drafter.proposers)
            if self.request.measure_log_likelihood and search.finished:
                score = search.finished[0].score
                row.mean_log_likelihood = score * row.new_tokens ** (self.terms.length_penalty - 1.0)
            rows.append(row)
        stats = GenerationStats(
            rows=rows,
            rule={"rule": "beams", "beams": self.beams, "sampled": self.sampled},
            drafter=self.drafter.describe(),
            seconds=seconds,
            prefill_seconds=self.prefill_seconds,
            phases=self.clock.phases(),
            cache_bytes=self.cache_bytes,
        )
        none = [Hypothesis(NO_ANSWER, [], False)] * count
        best = [answer for search in self.all_searches for answer in (search.finished + none)[:count]]
        records = [search.record for search in self.all_searches]
        return Outcome([answer.tokens for answer in best], records, stats, [answer.score for answer in best])

    # parts -----------------------------------------------------------------------------------------------------------

    def _take(self, nodes: Sequence[Sequence[Node]], logits: Tensor) -> None:
        """Attach the target's logits [B, M, V] to these nodes. Without processors, also list their successors."""
        for wanted, of_row in zip(nodes, logits, strict=True):
            for node, of_node in zip(wanted, of_row):
                node.verified, node.logits = True, of_node
        if not self.processors:
            values, tokens = functional.topk_logprobs(logits, self.successors)
            for row, (search, wanted) in enumerate(zip(self.searches, nodes, strict=True)):
                self._list(search.row, wanted, values[row, : len(wanted)], tokens[row, : len(wanted)])

    def look(self, row: int, nodes: Sequence[Node]) -> None:
        """Set ``likely`` and ``rest`` of nodes that the target has read, of one depth and one prompt.

        Args:
            row: the prompt's index in the request.
            nodes: of its forest.
        """
        unseen = [node for node in nodes if node.likely is None]
        if unseen:
            scores = self._processed(row, unseen)
            total = scores.double().exp().sum(-1) if self.sampled else 1.0
            self._list(row, unseen, *scores.topk(self.successors), total)

    @staticmethod
    def _list(row: int, nodes: Sequence[Node], values: Tensor, tokens: Tensor, total: Tensor | float = 1.0) -> None:
        """Set ``likely`` and ``rest`` of M nodes of one prompt.

        Args:
            row: the prompt's index in the request.
            nodes: M of them.
            values: [M, C] the largest log-probabilities, descending.
            tokens: [M, C] their tokens.
            total: [M] probability of all successors.
        """
        rests = total - values.double().exp().sum(-1)
        for node, known, ids, (rest,) in zip(nodes, *lists(values, tokens, rests[:, None]), strict=True):
            if not known[0] < math.inf:  # NaN sorts as the largest number
                raise NonFiniteLogitsError(
                    f"the target's log-probabilities in row {row} are NaN or +inf. Check its weights and dtype (fp16 "
                    "overflows; bf16 or fp32 do not), and the request's logits processors."
                )
            known = [value for value in known if value > -math.inf]
            node.likely, node.rest = (known, ids[: len(known)]), max(rest, 0.0)

    def _processed(self, row: int, nodes: Sequence[Node]) -> Tensor:
        """Return the target's processed log-probabilities [M, V], fp32, at nodes of one depth of one prompt."""
        logits = torch.stack([node.logits for node in nodes if node.logits is not None])
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
        """Return the dynamic width of a step, see :mod:`fsd_infer.engine.beams.sampling`."""
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
                self.proposer.finish(place, search.record.tokens)
        self.searches = [self.searches[place] for place in going]
        if not going:
            return
        rows = torch.tensor(going)
        self.forests[:] = [self.forests[place] for place in going]  # the proposer's list, too
        self.cache.select(rows)
        self.proposer.select(rows)

    def _record(self, search: Search) -> None:
        record = search.record
        record.steps = search.length
        record.decode_seconds = self.clock.seconds - self.prefill_seconds if self.prefill_seconds else 0.0
        if search.finished:
            record.tokens = search.finished[0].tokens
            record.finish_reason = "stop" if search.finished[0].stopped else "length"
