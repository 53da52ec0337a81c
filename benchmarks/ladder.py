"""Compare rules on drafters of rising strength for one target: the ladder.

    python -m benchmarks.ladder --rungs noise:0.08 shipped --rules tilted typical:exact_ngram_size=3 alone \\
        --prompts ifeval_dev.jsonl --every 6 --forecast --json ladder.json --figure ladder.png

A rung is a drafter's name as `--drafter` takes it, or ``noise:0.08``: a copy of the target whose weight matrices are
multiplied entry by entry with 1 + 0.08 · N(0, 1). Every rung drafts chains of ``--depth`` tokens and is one run of
`fsd-bench run` in batches, so its seconds say nothing. The rule ``alone`` is a small LM answering by itself.
``--forecast`` adds what `fsd-bench worth` forecasts for the rung. Finished rungs stay in ``--work``, where the same
command continues. ``--join`` takes the rungs of an earlier record into the new one; one that is named again gains a
forecast only.

The record ranks the rungs: by four numbers of the drafter, and by what the rules gain and spend. Its ``correlations``
are Spearman's between the two. ``--routing`` draws score over speed, with *routing*, which answers a share of the
prompts by the drafter alone and the others by ``exact``. A rule is worth something where it lies above that line.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

from benchmarks import results_page
from benchmarks.recorded import BUILT_IN, parser_of, record_main, run_resumed
from benchmarks.workplace import Workplace
from fsd_bench.prompts import Encoder, encode_rows, first_rows
from fsd_bench.record import write_record
from fsd_bench.worth.forecasts import forecast
from fsd_core.files import jsonable
from fsd_core.hub import is_hub_id
from fsd_core.tables import number, table
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import TreeShape
from fsd_infer.heads.hub import find_head
from fsd_infer.targets.builtin import is_builtin
from fsd_infer.targets.target import Target

ALONE, EXACT, NOISE = "alone", "exact", "noise:"
FLAWLESS = 0.125  # nats: place of a drafter without mistakes in the picture
SMALL = "1"  # nats: a mistake with a smaller gap is a near tie
# Equal quality: no further on the wrong side of exact's than this. Shares, except for nats per token of log-likelihood.
BOUNDS = {"score": -0.02, "log_likelihood_per_token": -0.05, "copied_4grams": 0.02, "repeated_4grams": 0.02}


def save_noisy_copy(target: str, share: float, seed: int, directory: Path) -> None:
    """Save a copy of the target whose layers' weight matrices are multiplied with 1 + share · N(0, 1)."""
    copy = Target.from_pretrained(target, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in copy.model.named_parameters():
            if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
                weight.mul_((1 + share * torch.randn(weight.shape, generator=generator)).to(weight))
    copy.model.save_pretrained(directory)
    copy.tokenizer.save_pretrained(directory)


def drafter_of(rung: str, args: argparse.Namespace, work: Workplace) -> str:
    """Return the drafter's name in the work directory. A noisy copy is made there once."""
    if not rung.startswith(NOISE):
        return work.link(rung)
    directory = work.directory / rung.replace(":", "-")
    if not directory.exists():
        save_noisy_copy(args.target, float(rung.removeprefix(NOISE)), args.seed, directory)
    return directory.name


def is_model(drafter: str) -> bool:
    """Return whether the drafter is a whole model, which can answer alone."""
    exists = is_builtin(drafter) or is_hub_id(drafter) or (Path(drafter) / "config.json").is_file()
    return exists and find_head(drafter) is None


def measure_rung(args: argparse.Namespace, target: str, drafter: str, prompts: str, file: Path) -> dict[str, Any]:
    """Return the rung's facts without a forecast, from its finished record if there is one."""
    shape = TreeShape.chain(args.depth)
    methods = [f"{EXACT}={EXACT}@{drafter}@{shape.text}"]
    methods += [f"{rule}@{drafter}@{shape.text}" for rule in args.rules if rule not in (EXACT, ALONE)]
    if ALONE in args.rules and is_model(drafter):
        settings = json.dumps({"prompts": "", "methods": [], "target": drafter, "threads": args.threads})
        methods.append(f"{ALONE}=command:" + shlex.join([sys.executable, "-m", "fsd_bench.worker", settings, "plain"]))
    if not file.exists():
        run_resumed(
            prompts, methods, file, target=target, raw=args.raw, score=args.score, every=args.every, limit=args.limit,
            max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed, batch_size=args.batch,
            threads=args.threads, log_likelihood=True, baselines=[EXACT],
        )  # fmt: skip
    record = json.loads(file.read_text(encoding="utf-8"))
    environment = {key: value for key, value in record["environment"].items() if key != "command"}  # which has paths
    rung = {"drafts": record["methods"][EXACT]["drafts"], "rules": rules_of(record), "environment": environment}
    training = Path(drafter) / "training.json"
    if training.is_file():
        trained = json.loads(training.read_text(encoding="utf-8"))
        options = trained["hyperparameters"]
        rung["training"] = {"from": options.get("drafter"), "loss": options.get("loss"), "steps": trained["steps"]}
    return rung


def rules_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return {rule: facts} from a rung's record: means, and how they differ from exact's on the same prompts."""
    differences, ratios = record["differences"][EXACT], record["ratios"][EXACT]
    rules = {}
    for name, facts in record["methods"].items():
        rule = name.partition("@")[0]
        keys = ("answers", "tau", "answer_tokens", "target_forwards", "divergence_spent", *BOUNDS)
        rules[rule] = {key: facts.get(key) for key in keys}
        if rule == ALONE:  # its forwards are the drafter's
            rules[rule] |= {"tau": None, "target_forwards": None}
        if name in differences:
            gain = ratios[name]["tau"] if rule != ALONE else None
            rules[rule] |= {"differences": differences[name], "gain": gain, "equal": within(differences[name])}
    return rules


def within(differences: dict[str, Any]) -> bool:
    """Return whether the measured quality equals exact's within :data:`BOUNDS`."""
    measured = [(differences[name]["mean"], bound) for name, bound in BOUNDS.items() if name in differences]
    return all(mean >= bound if bound < 0 else mean <= bound for mean, bound in measured)


def forecast_of(args: argparse.Namespace, target: str, drafter: str, prompts: str, file: Path) -> dict[str, Any]:
    """Return by rule: τ and nats forecast for the rung's chain, and tokens per cost / exact's best."""
    file = file.with_suffix(".forecast.json")
    if file.exists():
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return stored
    decoder = FuzzyDecoder.from_pretrained(target, drafter, tree=TreeShape.chain(args.depth))
    encode = Encoder.of(decoder, args.raw)
    rows = encode_rows(first_rows(prompts, encode, args.limit, args.every), encode)
    lossy = [rule for rule in args.rules if rule not in (EXACT, ALONE)]
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    result = forecast(decoder, rows, lossy, usual=False, seed=args.seed, progress=True, **options).to_dict()
    exact = result["rows"][0]["per_cost"]
    rules = {}
    for row in result["rows"]:
        shape = next(s for s in row["shapes"] if s["shape"] == result["decoded"])
        per_cost = {cost: value / exact[cost] for cost, value in row["per_cost"].items()}
        rules[row["rule"]] = {"tau": shape["tau"], "nats_per_token": shape["nats"], "per_cost": per_cost}
    write_record(file, jsonable(rules))
    return rules


def numbers_of(drafts: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a drafter that may predict what a rule gains. Near ties are a share of all drafts."""
    agreement, below = drafts["agreement"], drafts["below"][SMALL]
    near = {"below_1": below, "near_ties": (1 - agreement) * below}
    return {"agreement": agreement, "regret_median": drafts["regret_median"] or 0.0, **near}


def outcomes_of(rules: dict[str, Any]) -> dict[str, float]:
    """Return the best gain at equal quality, and what each rule gains and spends."""
    lossy = {rule: facts for rule, facts in rules.items() if facts.get("gain")}
    gains = {rule: facts["gain"]["ratio"] for rule, facts in lossy.items()}
    spent = {f"nats of {rule}": facts["divergence_spent"] / facts["answer_tokens"] for rule, facts in lossy.items()}
    equal = [gains[rule] for rule, facts in lossy.items() if facts["equal"]]
    return {"gain at equal quality": max([1.0, *equal])} | {f"gain of {rule}": gains[rule] for rule in gains} | spent


def routing_of(rules: dict[str, Any], depth: int, cost: float) -> dict[str, dict[str, float]]:
    """Return by rule tokens per cost, score, and the score of routing at that speed; empty without ``alone``.

    A round costs 1 + cost · depth target forwards, a token of the drafter alone costs ``cost``.
    """
    if ALONE not in rules or rules[ALONE]["score"] is None:
        return {}
    cost_per_token = {rule: (1 + cost * depth) / facts["tau"] for rule, facts in rules.items() if facts["tau"]}
    cost_per_token[ALONE] = cost
    first, last = rules[EXACT]["score"], rules[ALONE]["score"]
    routing = {}
    for rule, token_cost in cost_per_token.items():
        share = (cost_per_token[EXACT] - token_cost) / (cost_per_token[EXACT] - cost)
        score = {"score": rules[rule]["score"], "routed": first + share * (last - first)}
        routing[rule] = {"tokens_per_cost": 1 / token_cost, **score}
    return routing


def correlations_of(rungs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return {outcome: {number: Spearman's rank correlation}} over the rungs that have the outcome, three or more."""
    numbers = {name: numbers_of(rung["drafts"]) for name, rung in rungs.items()}
    outcomes = {name: outcomes_of(rung["rules"]) for name, rung in rungs.items()}
    correlations = {}
    for outcome in dict.fromkeys(key for values in outcomes.values() for key in values):
        names = [name for name, values in outcomes.items() if outcome in values]
        if len({outcomes[name][outcome] for name in names}) < 3:
            continue
        y = [outcomes[name][outcome] for name in names]
        ranked = {
            number_: float(spearmanr([numbers[name][number_] for name in names], y).statistic)
            for number_ in numbers[names[0]]
        }
        correlations[outcome] = {"rungs": len(names), **ranked}
    return correlations


def forecast_error(rungs: dict[str, Any]) -> dict[str, Any]:
    """Return how many cases of a rung and a lossy rule have a forecast, and how far its τ is from the measured one."""
    errors = [
        abs(rung["forecast"][rule]["tau"] / facts["tau"] - 1)
        for rung in rungs.values()
        for rule, facts in rung["rules"].items()
        if rule in rung.get("forecast", {}) and rule != EXACT
    ]
    if not errors:
        return {"cases": 0}
    near = sum(error <= 0.1 for error in errors) / len(errors)
    return {"cases": len(errors), "mean_error": sum(errors) / len(errors), "within_10_percent": near}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return bounds, rungs, correlations and the error of the forecasts. Raises FsdError."""
    figure, routing = (path and path.resolve() for path in (args.figure, args.routing))
    joined = {} if args.join is None else json.loads(Path(args.join).read_text(encoding="utf-8"))["rungs"]
    work = Workplace(args.work)
    target, prompts = work.link(args.target), work.link(args.prompts)
    drafters = {rung: drafter_of(rung, args, work) for rung in args.rungs}
    os.chdir(work.directory)
    rungs = dict(joined)
    for rung, drafter in drafters.items():
        job = target, drafter, prompts, Path(f"{Path(drafter).name}.json")
        name = Path(rung).name
        rungs[name] = joined.get(name) or measure_rung(args, *job)
        if args.forecast:
            rungs[name]["forecast"] = forecast_of(args, *job)
    if figure is not None:
        write_figure(rungs, figure)
    for rung in rungs.values():
        rung["routing"] = routing_of(rung["rules"], args.depth, args.cost)
    if routing is not None:
        write_routing(rungs, args.cost, routing)
    statistics = {"correlations": correlations_of(rungs), "forecast_error": forecast_error(rungs)}
    return {"bounds": BOUNDS, "rungs": rungs, **statistics}


def write_figure(rungs: dict[str, Any], path: Path) -> None:
    """Draw the gain in tokens per forward over the median gap, a line per rule. Hollow points: quality fell."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot(xlabel="median gap of a wrong first draft, nats", ylabel="tokens per forward / exact's")
    gaps = {name: rung["drafts"]["regret_median"] or FLAWLESS for name, rung in rungs.items()}
    for number_, rule in enumerate(dict.fromkeys(rule for rung in rungs.values() for rule in rung["rules"])):
        points = [(gaps[name], rung["rules"].get(rule, {})) for name, rung in rungs.items()]
        drawn = sorted((x, facts["gain"]["ratio"], facts["equal"]) for x, facts in points if facts.get("gain"))
        if not drawn:  # exact, and the drafter alone
            continue
        x, y, equal = zip(*drawn)
        axes.plot(x, y, color=f"C{number_}", label=rule)
        axes.scatter(x, y, edgecolors=f"C{number_}", c=[f"C{number_}" if same else "white" for same in equal], zorder=3)
    last = 0.0
    for name, gap in sorted(gaps.items(), key=lambda item: item[1]):
        last = max(gap, last * 1.11)  # names with similar gaps stand side by side
        axes.annotate(name, (last, 0.98), rotation=90, fontsize=6, ha="center", va="top")
    axes.axhline(1.0, color="grey", lw=0.8)
    axes.set_ylim(bottom=0.6)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    figure.legend(fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=130)


def write_routing(rungs: dict[str, Any], cost: float, path: Path) -> None:
    """Draw score over tokens per cost for each rung with ``alone``, and the line of routing."""
    from matplotlib.figure import Figure

    drawn = {name: rung["routing"] for name, rung in rungs.items() if rung["routing"]}
    figure = Figure(figsize=(2.9 * len(drawn), 3.4), layout="constrained")
    rules = list(dict.fromkeys(rule for routing in drawn.values() for rule in routing))
    panels = figure.subplots(1, len(drawn), squeeze=False)[0]
    for axes, (name, routing) in zip(panels, drawn.items()):
        line = sorted((facts["tokens_per_cost"], facts["routed"]) for facts in routing.values())
        axes.plot(*zip(*line), color="grey", lw=0.8, label="routing")
        for rule, facts in routing.items():
            axes.scatter(facts["tokens_per_cost"], facts["score"], c=f"C{rules.index(rule)}", label=rule, zorder=3)
        axes.set_title(name, fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"tokens per cost, c = {cost:g}")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    panels[0].set_ylabel("score")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=130)


def report(record: dict[str, Any]) -> str:
    """Return the page's table, and the rank correlations with each outcome."""
    names = ["rank correlation with", "rungs", "agreement", "median gap", "below 1 nat", "near ties"]
    ranks = [[outcome, *map(number, found.values())] for outcome, found in record["correlations"].items()]
    return f"{results_page.ladder(record)}\n\n{table(names, ranks)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every rung and write the record. Return 2 after bad input."""
    parser = parser_of(
        "benchmarks.ladder", __doc__, target=BUILT_IN, rungs=(["shipped"], "drafters, or noise:SHARE"),
        rules=(["tilted", "typical:exact_ngram_size=3", ALONE], "acceptance rules, or alone"), prompts=..., raw=False,
        score=("auto", "kind of reference"), every=1, limit=None, max_new_tokens=96, depth=(8, "drafts per chain"),
        batch=48, temperature=0.0, seed=1, threads=None, forecast=(False, "add the forecasts of `fsd-bench worth`"),
        join=(None, "earlier record whose rungs to add"), work=(Path("runs/ladder"), "directory of the rungs' records"),
        figure=(None, "picture of gain over the gap"), json=...,
        cost=(0.1, "of a drafted token, in target forwards"), routing=(None, "picture of score over speed"),
    )  # fmt: skip
    return record_main("benchmarks.ladder", parser, measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
