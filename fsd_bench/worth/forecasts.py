"""Forecast what each rule would emit, spend and take, each on the shape that suits it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fsd_bench.trials import decoding
from fsd_bench.worth.kept import KeptSums, modules_digest
from fsd_bench.worth.replay import Replay, Tally
from fsd_bench.worth.result import Forecast, ForecastRow, RuleOnShape
from fsd_bench.worth.watch import YARDSTICKS, Forwards, Watch
from fsd_core.errors import FsdError
from fsd_infer import __version__
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import Drafter, LMDrafter, TreeShape
from fsd_infer.drafters.tree_drafter import TreeDrafter
from fsd_infer.engine.first_choices import FirstChoiceStats
from fsd_infer.engine.plan import draws_of
from fsd_infer.engine.stats import GenerationStats
from fsd_infer.rules import Exact, Rule, Tilted, parse_rule
from fsd_infer.trees.tree import Draws

KL_COEFS = (8, 4, 2, 1.5, 1, 0.7, 0.5)
RULES = (
    *(f"tilted:{coef:g}" for coef in KL_COEFS),
    *(f"tilted:{coef:g}:min_p=0" for coef in KL_COEFS),
    "typical:exact_ngram_size=3", "relaxed:exact_ngram_size=3",
    "fuzzy:js:0.2:exact_ngram_size=3", "fuzzy:js:0.3:exact_ngram_size=3", "fuzzy:js:0.4:exact_ngram_size=3",
    "tilted", "tilted:2:deviation_cost=1", "tilted:1:deviation_cost=1",
    "asd:exact_ngram_size=3", "asd:gap=0.5:exact_ngram_size=3",
    "mars:0.5:exact_ngram_size=3", "mars:exact_ngram_size=3",
    "fly:exact_ngram_size=3", "cactus:0.25", "cactus:0.5", "lenient:0.5", "cascade-token:0.3",
)  # fmt: skip
MATCHING = tuple(f"tilted:match_temperature={value}" for value in (0.2, 0.3, 0.5, 0.8))  # at temperature 0
EXACT = {  # the exact rule by how drafts are drawn
    Draws.NONE: Exact(draw=False),
    Draws.TREE: Exact(block=False),
    Draws.CHAIN: Exact(block=True),
}
DEPTH = 12  # tokens of the chain to decode with
LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12)
STOP = 0.3
DEEP_TREE = TreeShape(depth=8, width=4, nodes=24)
TREES = ((1, 4), (2, 6), (3, 8), (4, 8), (4, 12), (5, 12), (5, 16), (6, 9), (6, 16), (8, 9), (8, 12), (8, 16), (8, 24))


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
    kept: Path | None = None,
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
        temperature, max_new_tokens, chat: options of the request.
        usual: replay :data:`RULES` too, and at temperature 0 :data:`MATCHING`.
        seed: seed of draws.
        progress: show a progress bar.
        kept: file that keeps the sums after each answer; a forecast goes on with those it finds there.

    Raises:
        FsdError: no prompts, a drafter without shapes, an invalid rule, sums of other settings, or whatever
            ``generate`` raises.
    """
    if not prompts:
        raise FsdError("no prompts: give at least one.")
    deep = deep_drafter(decoder.drafter if drafter is None else drafter)
    names = _rule_names(rules, usual, temperature)
    matching = {} if temperature else _matching(names)
    fixed = dict.fromkeys([*(rule for rule in names if rule not in matching), *chain(*map(fixed_coefs, matching))])
    replays = _replays(fixed, deep, frozenset(decoder.target.eos_token_ids), temperature)
    temperatures = dict.fromkeys([*YARDSTICKS, *matching.values()], 0.0)
    first = next(iter(replays.values()))
    watch = Watch(first.add, temperature, max_new_tokens, torch.Generator().manual_seed(seed), temperatures)
    options = {"drafter": deep, "callbacks": [watch], "apply_chat_template": chat}
    options |= decoding(temperature, max_new_tokens)
    decoded = _Decoded()
    asked = {"rules": [*names.values()], "temperature": temperature, "max_new_tokens": max_new_tokens, "chat": chat}
    settings = {} if kept is None else {**asked, "seed": seed, **_facts_of(decoder, deep, prompts)}
    sums = KeptSums(kept, settings, replays.values(), watch, decoded)
    _decode(decoder, prompts, replays, watch, seed, options, progress, decoded, sums)
    forwards = Forwards(decoder.target, decoded.length // len(prompts), deep.max_nodes)
    seconds = _RoundSeconds(forwards, watch.draft_seconds / max(watch.steps, 1), decoded.rest / decoded.rounds)
    kl_by_temperature = {t: nats / watch.contexts for t, nats in watch.spent.items()}
    by_rule = _by_rule(replays.values(), seconds)
    by_rule |= {rule: learned(rule, kl_by_temperature[t], by_rule) for rule, t in matching.items()}
    return Forecast(
        rows=_rows({name: by_rule[rule] for rule, name in names.items()}),
        drafts=decoded.drafts.summary(),
        yardsticks={f"{t:g}": kl_by_temperature[t] for t in YARDSTICKS},
        decoded=deep.shape,
        tau=decoded.emitted / decoded.rounds,
        rounds=decoded.rounds,
        temperature=temperature,
        **seconds.measured(),
    )


def _facts_of(decoder: FuzzyDecoder, drafter: TreeDrafter, prompts: Sequence[Any]) -> dict[str, Any]:
    """Return what has to be the same, besides the options, for a forecast to continue."""
    target = decoder.target
    return {
        "prompts": hashlib.sha256(repr(prompts).encode()).hexdigest(), "version": __version__,
        "weights": modules_digest([target.model, *drafter.modules()]),
        "dtype": str(target.dtype), "format": target.weight_format,
        "drafter": drafter.name, "shape": asdict(drafter.shape),
    }  # fmt: skip


@dataclass(frozen=True)
class _RoundSeconds:
    """Seconds of a target forward by its nodes, of a drafted depth, and of everything else in a round."""

    forwards: Forwards
    draft_step: float
    rest: float

    def of(self, depth: float, nodes: float) -> float:
        """Return the seconds of a round that drafts ``depth`` deep and verifies ``nodes`` nodes."""
        return depth * self.draft_step + self.forwards.at(nodes) + self.rest

    def measured(self) -> dict[str, Any]:
        """Return them as fields of a :class:`.Forecast`."""
        forwards = dict(zip(map(str, self.forwards.counts), self.forwards.seconds))
        return {"forwards": forwards, "draft_step": self.draft_step, "rest": self.rest}


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
        self.drafts.merge(stats.drafts.gaps())
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
    decoded: _Decoded,
    sums: KeptSums,
) -> None:
    """Decode the prompts by the rule of each replay, which gets the rounds. ``decoded`` adds up the first one's.

    Raises:
        FsdError: the first rule's answers end with their first tokens.
    """
    exact, done = next(iter(replays)), sums.restore()
    jobs = [(rule, number) for rule in replays for number in range(len(prompts))][done:]
    for rule, number in tqdm(jobs, desc="worth", unit="answer", disable=not progress):
        watch.replay, prompt = replays[rule].add, prompts[number]
        stats = decoder.generate([prompt], rule=rule, seed=seed + number, **options).stats
        if rule == exact:
            decoded.add(stats, len(decoder.encode(prompt, options["apply_chat_template"])))
        done += 1
        sums.save(done)
    if not decoded.rounds:
        raise FsdError("every answer ended with its first token: give other prompts, or more --max-new-tokens.")


def _rule_names(rules: Sequence[str | Rule], usual: bool, temperature: float) -> dict[Rule, str]:
    """Return the rules that can be forecast, exact first, with their names. ``usual``: as of :func:`forecast`."""
    listed = ["exact", *(RULES if usual else ()), *(MATCHING if usual and not temperature else ()), *rules]
    names = {parse_rule(rule): rule if isinstance(rule, str) else rule.name for rule in listed}
    return {rule: name for rule, name in names.items() if temperature == 0 or not rule.greedy_only}


def _replays(rules: Iterable[Rule], deep: TreeDrafter, eos: frozenset[int], temperature: float) -> dict[Exact, Replay]:
    """Return the replays by the exact rule that is decoded with, the first rule's first."""
    parts: dict[Exact, list[Rule]] = {}
    for rule in rules:
        parts.setdefault(EXACT[draws_of(deep, [rule], temperature)], []).append(rule)
    return {exact: Replay(part, _shapes(deep.shape), eos) for exact, part in parts.items()}


def _matching(rules: Iterable[Rule]) -> dict[Tilted, float]:
    """Return the rules with an adaptive KL coefficient and the temperatures that they match."""
    return {
        rule: rule.match_temperature
        for rule in rules
        if isinstance(rule, Tilted) and rule.match_temperature is not None
    }


def _by_rule(replays: Iterable[Replay], seconds: _RoundSeconds) -> dict[Rule, list[RuleOnShape]]:
    """Return what each rule does with each shape."""
    by_rule: dict[Rule, list[RuleOnShape]] = {}
    for (rule, shape), tally in chain(*(replay.tallies.items() for replay in replays)):
        by_rule.setdefault(rule, []).append(_shaped(shape, tally, seconds))
    return by_rule


def _shaped(shape: TreeShape, tally: Tally, seconds: _RoundSeconds) -> RuleOnShape:
    depth, nodes = tally.depths / tally.rounds, tally.nodes / tally.rounds
    return RuleOnShape(
        shape=shape,
        tau=tally.tokens / tally.rounds,
        nats=tally.nats / tally.tokens,
        lossy=tally.lossy / tally.tokens,
        depth=depth,
        nodes=nodes,
        seconds=seconds.of(depth, nodes),
    )


def fixed_coefs(rule: Tilted) -> list[Rule]:
    """Return rules of fixed KL coefficients between which one with an adaptive one lies."""
    return [
        Exact(),
        *(replace(rule, kl_coef=coef, match_temperature=None, min_p=rule.effective_min_p) for coef in KL_COEFS),
    ]


def learned(rule: Tilted, allowed: float, by_rule: Mapping[Rule, Sequence[RuleOnShape]]) -> list[RuleOnShape]:
    """Interpolate a rule with an adaptive KL coefficient between fixed ones that spend more and less.

    Args:
        rule: with an adaptive KL coefficient.
        allowed: nats per token to spend; at most what the smallest coefficient spends.
        by_rule: by rule, a forecast for each shape.
    """
    interpolated = []
    for shaped in zip(*(by_rule[fixed] for fixed in fixed_coefs(rule))):
        points = sorted(shaped, key=lambda point: point.nats)
        above = next((number for number, point in enumerate(points) if point.nats > allowed), None)
        interpolated.append(points[-1] if above is None else _between(points[above - 1], points[above], allowed))
    return interpolated


def _between(less: RuleOnShape, more: RuleOnShape, nats: float) -> RuleOnShape:
    share = (nats - less.nats) / (more.nats - less.nats)
    numbers = {
        entry.name: (1 - share) * getattr(less, entry.name) + share * getattr(more, entry.name)
        for entry in fields(RuleOnShape)
        if entry.name != "shape"
    }
    return replace(less, **numbers)


def _rows(by_name: dict[str, list[RuleOnShape]]) -> list[ForecastRow]:
    """Return the rows of a forecast. ``by_name``: what each rule does on each shape; exact first."""
    fastest = {name: max(cells, key=lambda cell: cell.tokens_per_second) for name, cells in by_name.items()}
    base = next(iter(fastest.values()))
    rows = [
        ForecastRow(name, cells, best, best.tau / base.tau, best.tokens_per_second / base.tokens_per_second)
        for (name, cells), best in zip(by_name.items(), fastest.values(), strict=True)
    ]
    return [rows[0], *sorted(rows[1:], key=lambda row: row.best.nats)]
