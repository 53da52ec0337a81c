"""Tables of benchmarks/results/README.md, each from the record that it names.

On the page a table stands between ``[NAME](NAME.json) <!-- FORM -->`` and ``<!-- end -->``: the record and one of
:data:`FORMS`. The text around the tables is written there by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.tables import beside_exact, columns, difference, ratio, sweep_tables, trainer_steps

RESULTS = Path(__file__).parent / "results"
TABLE = re.compile(r"(\[(\S+)]\(\2\.json\) <!-- (\w+) -->\n\n).*?(?=<!-- end -->)", re.DOTALL)
Record = dict[str, Any]


def plain(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def middle(interval: dict[str, float] | None) -> str:
    """The median ratio of paired speeds."""
    return "–" if interval is None else "{median:.2f} ({low:.2f}–{high:.2f})".format(**interval)


def run(record: Record) -> str:
    """Methods of `fsd-bench run`: τ, speeds, and the decoding speed over the last baseline's, pair by pair."""
    baseline = list(record["ratios"])[-1]
    lossy = any(facts.get("divergence_spent") for facts in record["methods"].values())
    header = ["method", "τ", "tok/s", "decode tok/s", f"decoding, × `{baseline}`", *["nats per token"] * lossy]
    rows = []
    for name, facts in record["methods"].items():
        ratios = record["ratios"][baseline].get(name, {})
        row = [f"`{name}`", plain(facts["tau"]), plain(facts["tokens_per_second"], 0)]
        row += [plain(facts["decode_tokens_per_second"], 0), middle(ratios.get("decode_tokens_per_second"))]
        row[-1] = "1" if name == baseline else row[-1]
        if lossy:
            row.append(plain((facts["divergence_spent"] or 0) / facts["answer_tokens"], 3))
        rows.append(row)
    return columns(header, rows)


def acceptance(record: Record) -> str:
    """Methods of `fsd-bench run` whose times mean nothing: τ, its ratio to the baseline's, likelihoods if measured."""
    baseline = list(record["ratios"])[-1]
    likely = any(facts["log_likelihood_per_token"] is not None for facts in record["methods"].values())
    rows = []
    for name, facts in record["methods"].items():
        tau_ratio = record["ratios"][baseline].get(name, {}).get("tau")
        nats = plain((facts["divergence_spent"] or 0) / facts["answer_tokens"], 3)
        row = [f"`{name}`", plain(facts["tau"]), "1" if name == baseline else ratio(tau_ratio), nats]
        rows.append([*row, *[plain(facts["log_likelihood_per_token"])] * likely])
    return columns(["method", "τ", f"× `{baseline}`", "nats per token", *["log-likelihood per token"] * likely], rows)


def fresh(record: Record) -> str:
    """Lossy rules of `fsd-bench run` with scores, compared with exact."""
    header = ["rule", "× τ", "score, points", "retention", "lost, gained", "ended, points", "repeated 4-grams, points"]
    return columns([*header, "nats per token"], beside_exact(record))


def ladder(record: Record) -> str:
    """Each rule on drafters of rising strength."""
    header = ["drafter", "agrees", "median gap", "below 1 nat", "rule", "× τ", "score, points", "log-likelihood"]
    rows = []
    for name, facts in record["rungs"].items():
        drafts, first = facts["drafts"], True
        drafter = [f"`{name}`", percent(drafts["agreement"]), plain(drafts["regret_median"])]
        drafter.append(percent(drafts["below"]["1"]))
        for rule, outcome in facts["rules"].items():
            if rule != "exact" and outcome.get("gain"):
                differences = outcome["differences"]
                cells = [ratio(outcome["gain"]), difference(differences.get("score"), 100, 1)]
                cells.append(difference(differences.get("log_likelihood_per_token"), 1, 3))
                rows.append([*(drafter if first else [""] * 4), f"`{rule}`", *cells])
                first = False
    return columns(header, rows)


def losses(record: Record) -> str:
    """Losses for a small LM: its first drafts, then tokens per cost under exact and under a rule."""
    rule = "tilted:1:floor=0"
    header = ["loss", "first draft agrees", "median gap", "below 1 nat", "`exact`", "× public", f"`{rule}`"]
    rows = []
    for name, facts in record["losses"].items():
        exact, lossy = facts["exact"], facts[rule]
        row = [
            f"`{name}`",
            percent(exact["agreement"]),
            plain(exact["regret_median"]),
            percent(exact["regret_below_1"]),
        ]
        row += [plain(exact["tokens_per_cost"]), ratio(exact["x_public"]), plain(lossy["tokens_per_cost"])]
        rows.append([*row, ratio(lossy["x_first"]), plain(lossy["nats_per_token"], 3), plain(lossy["repeated_4grams"])])
    return columns([*header, "× `lk`", "nats per token", "repeats"], rows)


def deviations(record: Record) -> str:
    """Deviations that were forced one at a time, by what was known before them."""
    header = ["deviations", "count", "harmful", "share of the gain", "answers that end, points each", "repeats, points"]
    rows = []
    for name, facts in record["forced"].items():
        row = [name, str(facts["on_right_answers"]), f"{100 * facts['harmful']:.1f} %", plain(facts["gain_share"])]
        rows.append([*row, difference(facts["ended"], 100, 1), difference(facts["repeated_4grams"], 100, 1)])
    return columns(header, rows)


def tuned(record: Record) -> str:
    """Rules compared with exact on the sets that chose them."""
    header = ["prompts", "right by `exact`", "rule", "× τ", "score, points", "lost, gained", "ended", "repeats"]
    rows = []
    for name, prompt_set in record["tuned"].items():
        for rule, facts in prompt_set["rules"].items():
            row = [f"{name}, {prompt_set['prompts']}", str(prompt_set["right_by_exact"]), f"`{rule}`"]
            row += [ratio(facts["tau"]), difference(facts["score"], 100, 1), f"{facts['lost']}, {facts['gained']}"]
            rows.append([*row, *(difference(facts[key], 100, 1) for key in ("ended", "repeated_4grams"))])
    return columns(header, rows)


def ties(record: Record) -> str:
    """Tokens that two ways to compute choose differently, by the nats that fp32's best token leads by."""
    header = ["pair", f"differ, of {record['positions']} tokens", f"answers with one, of {record['prompts']}"]
    edges = [f"{low:g} nats" for low, _, _ in next(iter(record["pairs"].values()))["by_lead"]]
    rows = []
    for name, pair in record["pairs"].items():
        share = "{mean:.1f} % ({low:.1f}–{high:.1f})".format(**{key: 100 * x for key, x in pair["differ"].items()})
        cells = [f"{differ} of {count}" for _, count, differ in pair["by_lead"]]
        rows.append([name, share, str(pair["answers_with_one"]), plain(max(pair["leads"], default=None)), *cells])
    return columns([*header, "largest lead", *(f"from {edge}" for edge in edges)], rows)


def memory(record: Record) -> str:
    """Tokens per forward and per second by workload, compared with the baseline."""
    rows = [
        [workload, f"`{method}`", plain(cell["tau"]), ratio(cell["tau_ratio"]), ratio(cell["tokens_per_second_ratio"]),
         plain(cell.get("oracle_tau"))]
        for workload, methods in record["workloads"].items()
        for method, cell in methods.items()
    ]  # fmt: skip
    return columns(["workload", "drafter", "τ", f"× `{record['baseline']}`'s", "× speed", "oracle's τ"], rows)


def training(record: Record) -> str:
    """Memory and time of a training step at a true target's shape, with random weights."""
    bytes_, step = record["memory"], record["step"]
    sizes = [f"{bytes_[key] / 1e9:.2f} GB" for key in ("predicted_bytes", "peak_bytes")]
    times = [f"{step[key]:.1f}" for key in ("predicted_seconds", "seconds", "cpu_seconds", "arithmetic_seconds")]
    header = ["memory: predicted", "peak", "seconds a step: predicted", "measured", "CPU seconds", "of arithmetic"]
    return columns(header, [sizes + times])


def trainers(record: Record) -> str:
    """A step of the head's training here and by other trainers, without the target."""
    steps = trainer_steps(record)
    rows = [
        [name, plain(ms, 0), plain(trained / 1e6, 1), "1" if name == "here" else plain(ms / steps[0][1])]
        for name, ms, trained in steps
    ]
    return columns(["trainer", "ms a step", "million trained parameters", "× the time"], rows)


def kinds(record: Record) -> str:
    """Quantised weights in their libraries and in our kernels."""
    rows = []
    for kind in record["kinds"]:
        row = [kind["kind"]]
        for stack in ("library", "kernels"):
            speeds = kind.get(stack) or {}
            row += [plain(speeds.get("plain"), 0), plain(speeds.get("exact"), 0)]
        rows.append(row)
    return columns(["weights", "library: `plain`", "`exact`", "kernels: `plain`", "`exact`"], rows)


def drawing(record: Record) -> str:
    """Other ways to draw a context's children, times the acceptance of one drawn child."""
    ratios = record["nodes"]["to_mixed"]
    return columns(["children", "× acceptance"], [[name, ratio(facts)] for name, facts in ratios.items()])


def choices(record: Record) -> str:
    """Choices in training: means over seeds, and each seed's τ; decoded, and by place in long chats, where measured."""
    arms: dict[str, list[Record]] = {}
    for run in record["runs"]:
        arms.setdefault(run["arm"], []).append(run)
    places = [name for name in record["runs"][0] if name.startswith("val_tau_from_")]
    decoded = "decoded_tau/exact" in record["runs"][0]
    rows = []
    for name, runs in arms.items():
        row = [name, "–".join(dict.fromkeys(str(run["steps"]) for run in runs))]
        row += [plain(mean(run["val_tau"] for run in runs)), ", ".join(plain(run["val_tau"]) for run in runs)]
        row += [percent(mean(run[f"val_agreement_{step}"] for run in runs)) for step in (0, 3)]
        if decoded:
            row.append(", ".join(plain(run["decoded_tau/exact"]) for run in runs))
        row += [plain(mean(run[place] for run in runs) if place in runs[0] else None) for place in places]
        rows.append(row)
    header = ["arm", "steps", "τ", "by seed", "first draft agrees", "fourth", *["decoded, by seed"] * decoded]
    return columns([*header, *(f"τ from {place.rpartition('_')[2]}" for place in places)], rows)


def by_place(record: Record) -> str:
    """Decoding in chats of growing length."""
    rows = [
        [name, "–".join(map(str, cell["prompt_tokens"])), plain(cell["tau"]), ratio(cell["ratio"])]
        for name, cell in record["places"].items()
    ]
    return columns(["earlier turns", "tokens before the answer", "τ", "× without"], rows)


FORMS: dict[str, Callable[[Record], str]] = {
    "fresh": fresh, "deviations": deviations, "ladder": ladder, "sweep": sweep_tables, "run": run, "losses": losses,
    "acceptance": acceptance, "drawing": drawing, "memory": memory, "kinds": kinds, "training": training,
    "trainers": trainers, "tuned": tuned, "ties": ties, "choices": choices, "by_place": by_place,
}  # fmt: skip


def filled(text: str) -> str:
    """Return the page with each table as its record has it."""

    def table(match: re.Match[str]) -> str:
        record = json.loads((RESULTS / f"{match[2]}.json").read_text("utf-8"))
        return f"{match[1]}{FORMS[match[3]](record).strip()}\n\n"

    return TABLE.sub(table, text)
