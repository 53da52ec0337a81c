"""The rounds of speculative beams: draft the next beams, read all nodes in one forward, take all possible steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig

from fsd_core import functional
from fsd_core.errors import FsdError, NonFiniteLogitsError
from fsd_core.functional import at_nodes
from fsd_core.tensors import lists, padded, to_device
from fsd_infer.device.clock import clock_of
from fsd_infer.device.cores import Team
from fsd_infer.device.memory import check_caches
from fsd_infer.drafters.base import Drafter, NoDrafter
from fsd_infer.drafters.frontier import Frontier
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.engine import Outcome, Request
from fsd_infer.engine.beams.options import BeamOptions, can_draft, check_beam_request, complete_options
from fsd_infer.engine.beams.plan import Planner
from fsd_infer.engine.beams.sampling import draw_candidates, dynamic_width, width_probabilities
from fsd_infer.engine.beams.search import Draw, Hypothesis, Search, SearchParameters
from fsd_infer.engine.stats import GenerationStats
from fsd_infer.request.processors import TreeProcessors
from fsd_infer.request.prompts import check_image_inputs, check_prompts, image_prompts, place_images, prefill_prompts
from fsd_infer.rules import Rule
from fsd_infer.targets.target import Target

log = logging.getLogger(__name__)

MANY = 128  # beams above which a search says what they cost
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
        drafter: beams are plain, with a warning, unless it :attr:`~.Drafter.drafts_beams`.
        rules: `exact` for every prompt.
        request: the request, without callbacks.
        config: with ``num_beams``, ``num_return_sequences``, ``length_penalty`` and ``early_stopping``.
        options: how beams are drafted.

    Returns:
        the best ``num_return_sequences`` answers of each prompt with their scores. If a search finds fewer, because
        its processors allow no more, the others are empty.

    Raises:
        FsdError: another rule, callbacks, incompatible options, recurrent layers, and errors of
            :func:`fsd_infer.request.prompts.check_prompts`.
        ContextLengthError: a prompt that leaves no room in the target's context.
        CacheMemoryError: KV caches that exceed the free or allowed memory; nothing is allocated then.
        NonFiniteLogitsError: NaN or +inf among the target's processed log-probabilities.
    """
    check_beam_request(rules, request)
    if (config.num_beams or 1) > MANY:
        log.warning("each of %d beams costs a text's cache, and its share of every forward", config.num_beams)
    with Team(target.device, request.generator is not None) as team:
        beams = _Beams(target, drafter, request, config, options or BeamOptions())
        beams.prefill()
        while beams.searches:
            team.fit_to_free_cores()
            frontier = beams.draft()
            beams.advance(frontier, beams.verify(frontier))
    return beams.outcome(config.num_return_sequences or 1)


class _Beams:
    """The searches of a batch. Nodes, texts and scores are on the CPU, the models' outputs on their device.

    Attributes:
        searches: the unfinished ones, B of them.
        roots: [B] slot of each root.
        features: [B, R, F] the target's features at the nodes that it has read, the root first.
    """

    def __init__(
        self, target: Target, drafter: Drafter, request: Request, config: GenerationConfig, options: BeamOptions
    ) -> None:
        self.beams = config.num_beams or 1
        if target.is_recurrent:
            raise FsdError(
                f"{target.name} has recurrent layers, which keep one state of a text and none of its beams: decode "
                "with num_beams=1, greedily or with do_sample=True."
            )
        limits = check_prompts(target, request.prompts, request.max_new_tokens, target.recompute_length)
        check_image_inputs(target, request.image_inputs)
        self.target, self.drafter, self.request = target, drafter, request
        self.device = target.device
        self.sampled = not request.greedy
        self.drafts = drafter if can_draft(drafter) else NoDrafter(target.vocab_size)
        self.options = complete_options(options, request, self.beams, self.drafts, self.device)
        self.processors = TreeProcessors(request.processors, len(request.prompts))
        self.parameters = SearchParameters(
            beams=self.beams,
            eos_token_ids=request.eos_token_ids,
            length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
            early_stopping=False if config.early_stopping is None else config.early_stopping,
            stops=self._stops if request.criteria else None,
            draw=self._draw if self.sampled else None,
            width=None if self.options.confidence is None else self._width,
            join_every=self.options.join_every,
        )
        listed = SUCCESSORS if self.sampled else self.parameters.candidates * self.beams
        self.list_size = min(target.vocab_size, listed)
        self.clock = clock_of(self.device)
        self._allocate(limits)
        self.prefill_seconds = 0.0

    def _allocate(self, limits: Sequence[int]) -> None:
        """Allocate searches and caches. Raises CacheMemoryError."""
        prompts, options, request, drafts = self.request.prompts, self.options, self.request, self.drafts
        # the nodes of this round and of the last, and the slot that padding is written to
        extra = 2 * (options.most_nodes(self.beams) + self.beams) + 1
        slots = extra + max(  # joined beams share all but the last tokens
            len(prompt) + min(self.beams * limit, limit + self.beams * (options.join_every or limit))
            for prompt, limit in zip(prompts, limits, strict=True)
        )
        count = len(prompts)
        self.cache_bytes = self.target.cache_bytes(count, slots) + drafts.cache_bytes(count, slots)
        if drafts.reads_features:  # the target's, and the head's own
            width = self.target.hidden_size
            element = torch.empty((), dtype=self.target.dtype).element_size()
            self.cache_bytes += count * slots * width * (2 + len(self.target.captured_layers)) * element
        shared = self.target.shared_cache_bytes + drafts.shared_cache_bytes
        check_caches(self.cache_bytes, count, slots, self.device, request.max_cache_bytes, shared)
        self.cache, self.slots = self.target.new_cache(count, slots), slots
        where = getattr(request.generator, "device", None)
        seed = int(torch.randint(2**62, (), generator=request.generator, device=where))
        seeded = request.generator is not None
        drafted = DraftRequest(count, slots, device=self.device, users=request.users, seeded=seeded)
        self.session = drafts.start(torch.tensor([prompt[0] for prompt in prompts]), drafted)
        rows = enumerate(zip(prompts, limits, strict=True))
        self.all_searches = [Search(self.parameters, prompt, limit, row, seed + row) for row, (prompt, limit) in rows]
        self.searches = list(self.all_searches)
        self.planner = Planner(self.parameters, options, self.session, self.list_likely, self.list_size)

    # a round ---------------------------------------------------------------------------------------------------------

    def prefill(self) -> None:
        """Read the prompts, and take the first step of each search."""
        prompts = self.request.prompts
        tokens, lengths = padded(prompts), torch.tensor([len(prompt) for prompt in prompts])
        prompt_images = image_prompts(self.target, tokens, lengths, self.request.image_inputs)
        features, logits = prefill_prompts(self.target, self.cache, tokens, lengths, prompt_images=prompt_images)
        place_images(self.session, self.cache, tokens, prompt_images)
        self.roots = to_device(lengths - 1, self.device)
        if tokens.shape[1] > 1:  # a head reads a token with the feature before it
            self.session.extend(to_device(tokens[:, 1:], self.device), features[:, :-1], self.roots.clone())
            self.session.extend_on_host([prompt[1:] for prompt in prompts])
        self.features = features[:, :0]
        frontier = self._frontier()
        self._take(frontier, logits)
        self.clock.lap("prefill")
        self.advance(frontier, at_nodes(features, self.roots[:, None]))
        self.prefill_seconds = self.clock.seconds

    def draft(self) -> Frontier:
        """Append drafts to each search, and return all nodes."""
        frontier = self._frontier()
        self.planner.plan(self.searches, frontier)
        self.clock.lap("draft")
        return frontier

    def verify(self, frontier: Frontier) -> Tensor:
        """Run the target over the nodes that it has not read; return its features at all nodes, [B, N, F]."""
        new = [range(search.read, len(search.tokens)) for search in self.searches]
        numbers, tokens, positions, visible = frontier.forward_inputs(self.cache, self.roots, new)
        logits, features = self.target.forward(tokens, positions, visible, self.cache)
        self._take(frontier, logits)
        for search in self.searches:
            search.record.target_forwards += 1
        self.clock.lap("target")
        more = 1 + max(map(len, frontier.tokens)) - self.features.shape[1]
        longer = torch.nn.functional.pad(self.features, (0, 0, 0, more))
        return longer.scatter(1, numbers[..., None].expand_as(features), features)

    def advance(self, frontier: Frontier, features: Tensor) -> None:
        """Take all possible steps; drop the nodes that no beam needs any more, and finished searches."""
        for search in self.searches:
            search.advance(self.list_likely)
        frontier.likely = [[successor.likely for successor in search.successors] for search in self.searches]
        room = self.slots - self.planner.nodes - self.beams  # for the nodes of the next round
        pruned = [search.prune(room) for search in self.searches]
        nodes, grown = [left for left, _ in pruned], [count for _, count in pruned]
        self.session.follow_beams(frontier, nodes, grown)
        texts = [search.shared for search in self.searches]
        self.session.extend_on_host([text[len(text) - count :] for text, count in zip(texts, grown, strict=True)])
        frontier.move(self.cache, self.roots, nodes)
        self.roots += to_device(torch.tensor(grown), self.device)
        order = [[0, *row][count:] for row, count in zip(nodes, grown, strict=True)]
        self.features = at_nodes(features, frontier.padded_nodes(order).clamp_max(features.shape[1] - 1))
        self._record_finished()
        self.clock.lap("search")

    def outcome(self, count: int) -> Outcome:
        """Return the best ``count`` answers of each prompt; statistics and records are of the best."""
        seconds = self.clock.seconds
        rows = []
        for search in self.all_searches:
            row = search.record.to_stats(self.prefill_seconds, search.prompt, self.drafter.proposers)
            if self.request.measure_log_likelihood and search.finished:
                score = search.finished[0].score
                row.mean_log_likelihood = score * row.new_tokens ** (self.parameters.length_penalty - 1.0)
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

    def _frontier(self) -> Frontier:
        return Frontier(
            tokens=[search.tokens for search in self.searches],
            parents=[search.parents for search in self.searches],
            lengths=[len(search.prompt) + len(search.shared) for search in self.searches],
            read=[search.read for search in self.searches],
            features=self.features,
        )

    def _take(self, frontier: Frontier, logits: Tensor) -> None:
        """Attach the target's logits [B, M, V] to its new nodes. Without processors, also list their successors."""
        for search, row_logits in zip(self.searches, logits, strict=True):
            for successors, node_logits in zip(search.successors[search.read :], row_logits):
                successors.logits = node_logits
            search.read = len(search.tokens)
        if not self.processors.is_needed:
            values, tokens = functional.topk_logprobs(logits, self.list_size)
            for row, search in enumerate(self.searches):
                new = range(frontier.read[row], search.read)
                self._list(search, new, values[row, : len(new)], tokens[row, : len(new)])

    def list_likely(self, search: Search, nodes: Sequence[int]) -> None:
        """Set ``likely`` and ``rest`` of nodes of one depth that the target has read."""
        unseen = [node for node in nodes if search.successors[node].likely is None]
        if unseen:
            scores = self._processed(search, unseen)
            total = scores.double().exp().sum(-1) if self.sampled else 1.0
            self._list(search, unseen, *scores.topk(self.list_size), total)

    @staticmethod
    def _list(
        search: Search, nodes: Sequence[int], values: Tensor, tokens: Tensor, total: Tensor | float = 1.0
    ) -> None:
        """Set ``likely`` and ``rest`` of M nodes.

        Args:
            search: whose nodes these are.
            nodes: M of them.
            values: [M, C] the largest log-probabilities, descending.
            tokens: [M, C] their tokens.
            total: [M] probability of all successors.
        """
        rests = total - values.double().exp().sum(-1)
        for node, values_of, ids, (rest,) in zip(nodes, *lists(values, tokens, rests[:, None]), strict=True):
            if not values_of[0] < math.inf:  # NaN sorts as the largest number
                raise NonFiniteLogitsError(
                    f"the target's log-probabilities in row {search.row} are NaN or +inf. Check its weights and dtype "
                    "(fp16 overflows; bf16 or fp32 do not), and the request's logits processors."
                )
            finite = [value for value in values_of if value > -math.inf]
            successors = search.successors[node]
            successors.likely, successors.rest = (finite, ids[: len(finite)]), max(rest, 0.0)

    def _processed(self, search: Search, nodes: Sequence[int]) -> Tensor:
        """Return the target's processed log-probabilities [M, V], fp32, at nodes of one depth that it has read."""
        logits = torch.stack([row for node in nodes if (row := search.successors[node].logits) is not None])
        scores = logits.float().log_softmax(-1)
        if not self.processors.is_needed:
            return scores
        if not self.processors.contextual:
            return self.processors.process_context_free(scores)
        texts = self._texts(search.row, [search.text(node) for node in nodes])
        return self.processors.process_texts(scores, texts, search.row)

    def _texts(self, row: int, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return a prompt followed by each of M texts of one length, [M, T], as ``generate`` would."""
        return to_device(torch.tensor([[*self.request.texts[row], *text] for text in texts]), self.device)

    def _stops(self, row: int, texts: list[list[int]]) -> list[bool]:
        assert self.request.criteria is not None
        stops: Tensor = self.request.criteria(self._texts(row, texts), None)
        return stops.tolist()

    def _draw(self, search: Search, count: int) -> list[Draw]:
        return draw_candidates(search, count, lambda node: self._processed(search, [node])[0].double().exp().cpu())

    def _width(self, search: Search) -> int:
        """Return the dynamic width of a step, see :mod:`fsd_infer.engine.beams.sampling`."""
        assert self.options.confidence is not None
        nodes, scores = zip(*search.live)
        target = [search.likely(node) for node in nodes]
        drafter = [search.successors[node].proposed or likely for node, likely in zip(nodes, target)]
        breadth, parameters = self.options.breadth(self.beams), self.parameters
        probs = width_probabilities(
            scores, target, drafter, self.beams, breadth, parameters.candidates, parameters.eos_token_ids
        )
        return dynamic_width(probs, self.options.confidence, self.options.min_width or 1)

    def _record_finished(self) -> None:
        """Record the answers of finished searches, and drop their rows."""
        unfinished = [row for row, search in enumerate(self.searches) if not search.done]
        if len(unfinished) == len(self.searches):
            return
        for row, search in enumerate(self.searches):
            if search.done:
                self._record(search)
                self.session.on_end(row, search.prompt, search.record.tokens)
        self.searches = [self.searches[row] for row in unfinished]
        if not unfinished:
            return
        rows = torch.tensor(unfinished)
        self.cache.keep_rows(rows)
        self.session.keep_rows(rows)
        kept = to_device(rows, self.device)
        self.roots, self.features = self.roots[kept], self.features[kept]

    def _record(self, search: Search) -> None:
        record = search.record
        record.steps = search.length
        record.decode_seconds = self.clock.seconds - self.prefill_seconds if self.prefill_seconds else 0.0
        if search.finished:
            record.tokens = search.finished[0].tokens
            record.finish_reason = "stop" if search.finished[0].stopped else "length"
