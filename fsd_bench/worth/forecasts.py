"""Forecast what each rule would emit, spend and take, each on the shape that suits it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from typing import Any

import torch
from tqdm import tqdm

from fsd_bench.jobs import decoding
from fsd_bench.worth.replay import Replay, Tally
from fsd_bench.worth.watch import YARDSTICKS, Forwards, Watch
from fsd_core.errors import FsdError
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import Drafter, LMDrafter, TreeShape
from fsd_infer.drafters.tree_drafter import TreeDrafter
from fsd_infer.engine.drafts import FirstChoiceStats
from fsd_infer.engine.stats import GenerationStats
from fsd_infer.rules import Exact, Rule, Tilted, parse_rule
from fsd_infer.trees.tree import Draws

KL_COEFS = (8, 4, 2, 1.5, 1, 0.7, 0.5)
RULES = (
    *(f"tilted:{coef:g}" for coef in KL_COEFS),
    *(f"tilted:{coef:g}:min_p=0" for coef in KL_COEFS),
    *(
        "typical:exact_ngram_size=3",
        "relaxed:exact_ngram_size=3",
        "fuzzy:js:0.2:exact_ngram_size=3",
        "fuzzy:js:0.3:exact_ngram_size=3",
        "fuzzy:js:0.4:exact_ngram_size=3",
    ),
    *("tilted", "tilted:2:toll=1", "tilted:1:toll=1"),
    *(
        "asd:exact_ngram_size=3",
        "asd:gap=0.5:exact_ngram_size=3",
        "mars:0.5:exact_ngram_size=3",
        "mars:exact_ngram_size=3",
    ),
    *("fly:exact_ngram_size=3", "cactus:0.25", "cactus:0.5", "lenient:0.5", "cascade-token:0.3"),
)
MATCHING = (
    "tilted:match_temperature=0.2",
    "tilted:match_temperature=0.3",
    "tilted:match_temperature=0.5",
    "tilted:match_temperature=0.8",
)  # at temperature 0
EXACT = {Draws.NONE: Exact(draw=False), Draws.TREE: Exact(), Draws.CHAIN: Exact(block=True)}  # on drafts drawn so
COSTS = (0.05, 0.1, 0.2, 0.4, 1.0)  # of a drafted token, in target forwards
DEPTH = 12  # of the chain that is decoded with
LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12)
STOP = 0.3
DEEP_TREE = TreeShape(depth=8, width=4, nodes=24)
TREES = ((1, 4), (2, 6), (3, 8), (4, 8), (4, 12), (5, 12), (5, 16), (6, 9), (6, 16), (8, 9), (8, 12), (8, 16), (8, 24))


@dataclass(frozen=True)
class Shaped:
    """A rule with a shape.

    Attributes:
        tau: tokens per target forward.
        nats: nats per token, as rules count them.
        lossy: share of tokens that only another distribution than the target's lets through.
        depth, nodes: mean depth and size of the trees, the root counted.
        seconds: seconds per round, by this run's clock.
    """

    shape: TreeShape
    tau: float
    nats: float
    lossy: float
    depth: float
    nodes: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tau / self.seconds

    def per_cost(self, cost: float) -> float:
        """Return tokens per target forward's worth of work. A drafted token costs ``cost`` forwards, nodes nothing."""
        return self.tau / (1 + cost * self.depth)


@dataclass(frozen=True)
class ForecastRow:
    """A rule on all shapes.

    Attributes:
        best: the fastest shape.
        tokens, speed: tokens per forward and speed there, as multiples of exact's on its fastest shape.
    """

    rule: str
    shapes: list[Shaped]
    best: Shaped
    tokens: float
    speed: float

    def per_cost(self, cost: float) -> float:
        return max(each.per_cost(cost) for each in self.shapes)


@dataclass
class Forecast:
    """What rules are worth with a drafter.

    Attributes:
        rows: exact first, then from the cheapest rule per token to the dearest.
        drafts: of the drafter's first choices, see :meth:`.FirstChoiceStats.summary`.
        yardsticks: by temperature, nats per token that the target's own samples spend, counted as at temperature 0.
        decoded: shape of the run with exact.
        tau, rounds: measured τ of that run, and its number of rounds.
        temperature: of the request.
        forwards: seconds of a target forward by number of nodes.
        draft_step, rest: seconds of a drafted depth, and of everything else in a round.
    """

    rows: list[ForecastRow]
    drafts: dict[str, Any]
    yardsticks: dict[str, float]
    decoded: TreeShape
    tau: float
    rounds: int
    temperature: float
    forwards: dict[str, float]
    draft_step: float
    rest: float

    @property
    def exact(self) -> ForecastRow:
        return self.rows[0]

    def row(self, rule: str) -> ForecastRow:
        """Return the row of a rule. Raises KeyError for a rule that was not replayed."""
        return {row.rule: row for row in self.rows}[rule]

    def frontier(self, most_nats: float = float("inf")) -> list[ForecastRow]:
        """Return the rules faster than exact and than every cheaper rule, from cheap to dear."""
        found, fastest = [], 1.0
        for row in self.rows[1:]:
            if row.speed > fastest and row.best.nats <= most_nats:
                found.append(row)
                fastest = row.speed
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as JSON values."""
        made = asdict(self)
        for row, facts in zip(self.rows, made["rows"], strict=True):
            facts["per_cost"] = {f"{cost:g}": row.per_cost(cost) for cost in COSTS}
        return made


def deep_drafter(drafter: Drafter) -> TreeDrafter:
    """Return the drafter with a shape that others can be cut from: the requested one, or a deep default.

    Raises:
        FsdError: the drafter has no shapes.
    """
    if not isinstance(drafter, TreeDrafter):
        raise FsdError(f"worth forecasts for heads and small LMs, not for drafter {drafter.name!r}: name one of these.")
    if drafter.has_default_shape or drafter.bounds is not None:
        return drafter.with_shape(TreeShape.chain(DEPTH) if isinstance(drafter, LMDrafter) else DEEP_TREE)
    return drafter.with_shape(replace(drafter.shape, stop_below=0.0))


def _shapes(whole: TreeShape) -> list[TreeShape]:
    """The shapes to replay, with the one that is decoded among them."""
    if whole.width == 1:
        chains = [TreeShape.chain(length) for length in LENGTHS if length < whole.depth]
        stopped = [TreeShape.chain(length, STOP) for length in {8, whole.depth} if length <= whole.depth]
        return [*chains, whole, *stopped]
    cuts = [TreeShape(d, whole.width, n) for d, n in TREES if d <= whole.depth and n <= whole.nodes]
    return [*(cut for cut in cuts if cut != whole), whole]


def forecast(
    decoder: FuzzyDecoder,
    prompts: Sequence[Any],
    rules: Sequence[str | Rule] = (),
    *,
    drafter: Drafter | None = None,
    temperature: float = 0.0,
    max_new_tokens: int = 96,
    chat: bool | None = None,
    usual: bool = True,
    seed: int = 0,
    progress: bool = False,
) -> Forecast:
    """Decode the prompts once with ``exact``, and replay rules on the rounds.

    Above temperature 0, rules that take other drafts than ``exact`` does are replayed on rounds of their own, with
    drafts drawn as the rule takes them.

    Args:
        decoder: target and drafter.
        prompts: as for :meth:`FuzzyDecoder.generate`, one after the other.
        rules: rules to replay besides exact and the usual ones.
        drafter: a head or a small LM whose shape is cut; None: the decoder's. Without a requested shape it drafts
            :data:`DEPTH` tokens, or :data:`DEEP_TREE`.
        temperature, max_new_tokens, chat: of the request.
        usual: replay :data:`RULES` too, and at temperature 0 :data:`MATCHING`.
        seed: seed of draws.
        progress: show a progress bar.

    Raises:
        FsdError: no prompts, a drafter without shapes, an invalid rule, or whatever ``generate`` raises.
    """
    if not prompts:
        raise FsdError("no prompts: give at least one.")
    deep = deep_drafter(decoder.drafter if drafter is None else drafter)
    shapes = _shapes(deep.shape)
    tried = _rules([*(RULES if usual else ()), *(MATCHING if usual and not temperature else ()), *rules], temperature)
    matching = {} if temperature else _matching(tried)
    fixed = dict.fromkeys([*(rule for rule in tried if rule not in matching), *chain(*map(fixed_coefs, matching))])
    eos = decoder.target.model.generation_config.eos_token_id
    replays = _replays(fixed, shapes, frozenset([eos] if isinstance(eos, int) else eos or ()), temperature)
    temperatures = dict.fromkeys([*YARDSTICKS, *matching.values()], 0.0)
    exact = next(iter(replays))  # from whose rounds come the facts about decoding
    watch = Watch(replays[exact].add, temperature, max_new_tokens, torch.Generator().manual_seed(seed), temperatures)
    options = {
        "drafter": deep,
        "callbacks": [watch],
        "apply_chat_template": chat,
        **decoding(temperature, max_new_tokens),
    }
    decoded = _decode(decoder, prompts, replays, watch, seed, options, progress)
    forwards = Forwards(decoder.target, decoded.length // len(prompts), deep.max_nodes)
    step, rest = watch.draft_seconds / max(watch.steps, 1), decoded.rest / decoded.rounds
    spent = {t: nats / watch.contexts for t, nats in watch.spent.items()}
    found: dict[Rule, list[Shaped]] = {}
    for (rule, shape), tally in chain(*(replay.tallies.items() for replay in replays.values())):
        found.setdefault(rule, []).append(_shaped(shape, tally, forwards, step, rest))
    cells = {rule: found[rule] for rule in tried if rule in found}
    cells |= {rule: learned(rule, spent[t], found) for rule, t in matching.items()}
    return Forecast(
        _rows({tried[rule]: shaped for rule, shaped in cells.items()}), decoded.drafts.summary(),
        {f"{t:g}": spent[t] for t in YARDSTICKS}, deep.shape, decoded.emitted / decoded.rounds, decoded.rounds,
        temperature,
        {str(count): seconds for count, seconds in zip(forwards.counts, forwards.seconds)}, step, rest,
    )  # fmt: skip


@dataclass
class _Decoded:
    """Sums over the answers of exact: its drafts, tokens of verifying rounds, rounds, other seconds, texts' tokens."""

    drafts: FirstChoiceStats = field(default_factory=FirstChoiceStats)
    emitted: int = 0
    rounds: int = 0
    rest: float = 0.0
    length: int = 0

    def add(self, stats: GenerationStats, prompt: int) -> None:
        """Add an answer. ``prompt``: tokens of its prompt."""
        self.drafts.merge(stats.drafts.regrets())
        self.emitted += stats.new_tokens - 1
        self.rounds += stats.target_forwards
        self.rest += stats.phases.get("rule", 0.0) + stats.phases.get("cache", 0.0)
        self.length += prompt + stats.new_tokens


def _decode(
    decoder: FuzzyDecoder,
    prompts: Sequence[Any],
    replays: Mapping[Exact, Replay],
    watch: Watch,
    seed: int,
    options: Mapping[str, Any],
    progress: bool,
) -> _Decoded:
    """Decode the prompts by the rule of each replay, which hears of the rounds. Return sums over the first one's.

    Raises:
        FsdError: the first rule's answers end with their first tokens.
    """
    decoded, exact = _Decoded(), next(iter(replays))
    jobs = [(rule, number) for rule in replays for number in range(len(prompts))]
    for rule, number in tqdm(jobs, desc="worth", unit="answer", disable=not progress):
        watch.seen, prompt = replays[rule].add, prompts[number]
        stats = decoder.generate([prompt], rule=rule, seed=seed + number, **options).stats
        if rule == exact:
            decoded.add(stats, len(decoder.encode(prompt, options["apply_chat_template"])))
    if not decoded.rounds:
        raise FsdError("every answer ended with its first token: give other prompts, or more --max-new-tokens.")
    return decoded


def _rules(rules: Sequence[str | Rule], temperature: float) -> dict[Rule, str]:
    """Return the names of exact and of the rules that can be forecast."""
    made = {parse_rule(rule): rule if isinstance(rule, str) else rule.name for rule in ("exact", *rules)}
    return {rule: name for rule, name in made.items() if temperature == 0 or not rule.greedy_only}


def _replays(
    rules: Iterable[Rule], shapes: Sequence[TreeShape], eos: frozenset[int], temperature: float
) -> dict[Exact, Replay]:
    """Return the replays by the exact rule that is decoded with, the first rule's first."""
    parts: dict[Exact, list[Rule]] = {}
    for rule in rules:
        parts.setdefault(EXACT[rule.draws] if temperature else Exact(), []).append(rule)
    return {exact: Replay(part, shapes, eos) for exact, part in parts.items()}


def _matching(rules: Iterable[Rule]) -> dict[Tilted, float]:
    """Return the rules with an adaptive KL coefficient and the temperatures that they match."""
    return {
        rule: rule.match_temperature
        for rule in rules
        if isinstance(rule, Tilted) and rule.match_temperature is not None
    }


def _shaped(shape: TreeShape, tally: Tally, forwards: Forwards, step: float, rest: float) -> Shaped:
    depth, nodes = tally.depths / tally.rounds, tally.nodes / tally.rounds
    return Shaped(
        shape, tally.tokens / tally.rounds, tally.nats / tally.tokens, tally.lossy / tally.tokens, depth, nodes,
        depth * step + forwards.at(nodes) + rest,
    )  # fmt: skip


def fixed_coefs(rule: Tilted) -> list[Rule]:
    """Return rules of fixed KL coefficients between which one with an adaptive one lies."""
    return [
        Exact(),
        *(replace(rule, kl_coef=coef, match_temperature=None, min_p=rule.effective_min_p) for coef in KL_COEFS),
    ]


def learned(rule: Tilted, allowed: float, found: Mapping[Rule, Sequence[Shaped]]) -> list[Shaped]:
    """Interpolate a rule with an adaptive KL coefficient between fixed ones that spend more and less.

    Args:
        rule: with an adaptive KL coefficient.
        allowed: nats per token to spend; at most what the smallest coefficient spends.
        found: by rule, a forecast for each shape.
    """
    made = []
    for shaped in zip(*(found[fixed] for fixed in fixed_coefs(rule))):
        points = sorted(shaped, key=lambda point: point.nats)
        above = next((number for number, point in enumerate(points) if point.nats > allowed), None)
        made.append(points[-1] if above is None else _between(points[above - 1], points[above], allowed))
    return made


def _between(less: Shaped, more: Shaped, nats: float) -> Shaped:
    share = (nats - less.nats) / (more.nats - less.nats)
    numbers = {
        each.name: (1 - share) * getattr(less, each.name) + share * getattr(more, each.name)
        for each in fields(Shaped)
        if each.name != "shape"
    }
    return replace(less, **numbers)


def _rows(found: dict[str, list[Shaped]]) -> list[ForecastRow]:
    """``found``: a forecast for each shape, by the rule's name; exact first."""
    fastest = {name: max(cells, key=lambda cell: cell.tokens_per_second) for name, cells in found.items()}
    base = next(iter(fastest.values()))
    rows = [
        ForecastRow(name, cells, best, best.tau / base.tau, best.tokens_per_second / base.tokens_per_second)
        for (name, cells), best in zip(found.items(), fastest.values(), strict=True)
    ]
    return [rows[0], *sorted(rows[1:], key=lambda row: row.best.nats)]
