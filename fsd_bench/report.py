"""Format records for the terminal: the tables of a benchmark, the lines of a calibration and of an estimate."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from fsd_bench.estimate import COLUMNS, Planned, by_device
from fsd_bench.intervals import mean_text, ratio_text
from fsd_bench.roofline import HARDWARE, size
from fsd_core.tables import number, percent, table
from fsd_infer.trees.shape import TreeShape

WIDTH = 100  # columns of a terminal


def fitted_tables(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, cut into several that repeat the first column if a line would exceed :data:`WIDTH`."""
    columns = list(zip(headers, *rows, strict=True))
    sizes = [max(map(len, column)) for column in columns]
    parts: list[list[int]] = [[]]
    for index in range(1, len(columns)):
        if parts[-1] and sizes[0] + sum(2 + sizes[i] for i in [*parts[-1], index]) > WIDTH:
            parts.append([])
        parts[-1].append(index)
    return "\n\n".join(
        table([headers[0], *(headers[i] for i in part)], [[row[0], *(row[i] for i in part)] for row in rows])
        for part in parts
    )


def bench_table(record: dict[str, Any]) -> str:
    """Return the tables of a benchmark's record, at most 100 columns wide.

    Speed, ratios and answers come first. Tables of score, log-likelihood, first drafts, tau by category and phases
    follow if they were measured.
    """
    methods = record["methods"]
    parts = [_speed_table(record), _answers_table(record)]
    more = (_quality_table(record), _paired_table(record), _drafts_table(methods))
    parts += [part for part in more if part]
    categories = list(next(iter(methods.values()))["categories"])
    drafted = {name: facts for name, facts in methods.items() if facts["tau"] is not None}
    if len(categories) > 1 and drafted:
        taus = [{name: part["tau"] for name, part in facts["categories"].items()} for facts in drafted.values()]
        rows = [[name, *(number(tau[name]) for tau in taus)] for name in categories]
        rows.append(["mean", *(number(facts["tau_category_mean"]) for facts in drafted.values())])
        parts.append("tau by category\n" + fitted_tables(["category", *drafted], rows))
    phased = {name: facts for name, facts in methods.items() if facts["phases"]}
    if phased:
        parts.append("where the time goes, % of each method's time\n" + _phases_table(phased))
    return "\n\n".join(parts)


def brief_table(record: dict[str, Any]) -> str:
    """Return one table of five columns: what a method gains, and what it costs."""
    first = record["baseline"]
    headers = ["method", "tok/s", f"x {first}", "tokens per forward", "nats per token"]
    rows = []
    for name, facts in record["methods"].items():
        ratio = record["ratios"][first].get(name)
        times = "1" if ratio is None else number(ratio["tokens_per_second"]["median"])
        spent = facts["divergence_spent"]
        nats = None if spent is None else spent / max(facts["answer_tokens"], 1)
        rows.append([name, number(facts["tokens_per_second"], 1), times, number(facts["tau"]), number(nats, 3)])
    return table(headers, rows)


def _speed_table(record: dict[str, Any]) -> str:
    headers = ["method", "tok/s", "decode tok/s", "s/answer", "prefill s"]
    headers += [f"x {baseline} [95 %]" for baseline in record["ratios"]]
    rows = []
    for name, facts in record["methods"].items():
        row = [name, number(facts["tokens_per_second"], 1), number(facts["decode_tokens_per_second"], 1)]
        row += [number(facts["seconds_per_answer"]), number(facts["prefill_seconds"], 3)]
        for against in record["ratios"].values():
            row.append(ratio_text(against[name]["tokens_per_second"], "median") if against.get(name) else "1")
        rows.append(row)
    answers = next(iter(record["methods"].values()))["answers"]
    blocks = (record.get("settings") or {}).get("isolate")
    unit = "prompt" if blocks is None else "block"
    note = f"{answers} prompt{'s' * (answers != 1)}"
    if blocks is not None:
        filled = min(blocks, math.ceil(answers / (record["settings"].get("batch_size") or 1)))
        note += f" in {filled} block{'s' * (filled != 1)}, each in its own process"
    note += f"; medians over {unit}s; tok/s counts prefill, ratios compare tok/s {unit} by {unit}"
    return "speed\n" + fitted_tables(headers, rows) + "\n" + note


def head_trees(methods: dict[str, Any]) -> dict[str, list[str]]:
    """Return the trees that heads drafted in a record, as --tree takes them, and the methods of each."""
    drafters = {name: facts.get("drafter") or {} for name, facts in methods.items()}
    by_tree: dict[str, list[str]] = {}
    for name, drafter in drafters.items():
        head = drafter.get("main", drafter)
        if drafter.get("tree"):
            by_tree.setdefault(drafter["tree"], []).append(name)
        elif head.get("name") == "eagle":
            stop = [f"{head['stop_below']:.1f}"] if head.get("stop_below") else []
            tree = ",".join([str(head["depth"]), str(head["width"]), str(head["nodes"]), *stop])
            by_tree.setdefault(tree, []).append(name)
    return by_tree


def _trees_note(methods: dict[str, Any]) -> str:
    """Return a line for each tree and the methods that share it."""
    methods_by_tree = head_trees(methods)
    is_only = len(methods_by_tree) == 1
    lines = [f"tree {tree}" + ("" if is_only else f": {', '.join(of)}") for tree, of in methods_by_tree.items()]
    return "".join("\n" + textwrap.fill(line, WIDTH) for line in lines)


def _answers_table(record: dict[str, Any]) -> str:
    methods = record["methods"]
    headers = ["method", "tau", "forwards", "tokens", "ended %", "same %", "gate open %", "nats spent"]
    rows = []
    for name, facts in methods.items():
        row = [name, number(facts["tau"]), number(facts["target_forwards"], 1)]
        row += [number(facts["answer_tokens"], 1)]
        row += [percent(facts[key], 0) for key in ("finished_fraction", "identical_to_baseline")]
        rows.append([*row, percent(facts["gate_open_fraction"], 1), number(facts["divergence_spent"])])
    note = f"means per answer; ended: by a stop token; same: tokens are those of {record['baseline']}"
    note += _trees_note(methods)
    return "answers\n" + fitted_tables(headers, rows) + "\n" + note


def _quality_table(record: dict[str, Any]) -> str:
    """Return task score and log-likelihood, if measured, with differences to the first baseline."""
    methods = record["methods"]
    columns = [("score", "score %", 100.0, 1), ("log_likelihood_per_token", "log-lik", 1.0, 3)]
    measured = [column for column in columns if any(column[0] in facts["intervals"] for facts in methods.values())]
    if not measured:
        return ""
    counts = [facts["intervals"].get("score", {}).get("prompts", 0) for facts in methods.values()]
    note = f"score: of {max(counts)} prompts with a reference" if max(counts) else ""
    if any(quantity == "log_likelihood_per_token" for quantity, *_ in measured):
        note += ("\n" if note else "") + "log-lik: of the tokens under the target, nats per token"
    return "quality\n" + _means_table(record, measured) + "\n" + note


def _means_table(record: dict[str, Any], columns: Sequence[tuple[str, str, float, int]]) -> str:
    """Return columns (quantity, title, scale, digits), each with its difference to the first baseline."""
    methods, baseline = record["methods"], record["baseline"]
    headers, rows = ["method"], [[name] for name in methods]
    for quantity, title, scale, digits in columns:
        headers += [f"{title} [95 %]", f"less {baseline} [95 %]"]
        for row, (name, facts) in zip(rows, methods.items(), strict=True):
            difference = record["differences"][baseline].get(name, {}).get(quantity)
            row += [mean_text(facts["intervals"].get(quantity), scale, digits), mean_text(difference, scale, digits)]
    return fitted_tables(headers, rows)


def _paired_table(record: dict[str, Any]) -> str:
    """Return the comparison with the first baseline that needs no reference, or "" if only that was measured."""
    methods, baseline = record["methods"], record["baseline"]
    against, agreement = record["ratios"].get(baseline, {}), record.get("agreement", {}).get(baseline, {})
    if not any("answer_tokens" in compared for compared in against.values()):
        return ""
    headers, rows = ["method", "tokens x [95 %]", "forwards x [95 %]", "same end % [95 %]"], []
    for name in methods:
        sums = [ratio_text(against.get(name, {}).get(quantity)) for quantity in ("answer_tokens", "target_forwards")]
        rows.append([name, *sums, mean_text(agreement.get(name), 100.0, 1)])
    columns = [("copied_4grams", "copied 4-grams %", 100.0, 1), ("repeated_4grams", "repeated 4-grams %", 100.0, 1)]
    for quantity, title in (("coverage", "coverage %"), ("other_language", "other language %")):
        columns += [(quantity, title, 100.0, 1)] * any(facts.get(quantity) is not None for facts in methods.values())
    columns.append(("finished_fraction", "ended %", 100.0, 1))
    note = "copied: of 4-grams those that stand in the prompt; repeated: that occurred before in the answer\n"
    note += f"x: sums over answers, of {baseline}'s; same end: the last number, or the option named, is its own"
    table = fitted_tables(headers, rows)
    return f"compared with {baseline}\n{table}\n\n{_means_table(record, columns)}\n{note}"


def _drafts_table(methods: dict[str, Any]) -> str:
    """Return how good the first drafts are, or "" if no method has any."""
    # peers describe their drafter under the same name
    drafted = {name: facts["drafts"] for name, facts in methods.items() if "agreement" in (facts.get("drafts") or {})}
    if not drafted:
        return ""
    bounds = list(next(iter(drafted.values()))["below"])
    rows = [
        [name, str(drafts["count"]), percent(drafts["agreement"], 1), number(drafts["regret_median"])]
        + [percent(share, 0) for share in drafts["below"].values()]
        for name, drafts in drafted.items()
    ]
    note = "right: the target's likeliest token; gap of the others: ln p(likeliest) - ln p(draft), nats"
    headers = ["method", "contexts", "right %", "median gap", *(f"below {bound} %" for bound in bounds)]
    return "first drafts\n" + fitted_tables(headers, rows) + "\n" + note


def _phases_table(methods: dict[str, dict[str, Any]]) -> str:
    phases = list(dict.fromkeys(phase for facts in methods.values() for phase in facts["phases"]))
    rows = []
    for name, facts in methods.items():
        shares = [percent(facts["phase_fractions"].get(phase, 0.0), 1) for phase in phases]
        per_round = sum(facts["milliseconds_per_round"].values()) if facts["milliseconds_per_round"] else None
        rows.append([name, *shares, number(per_round, 1), percent(facts["round_overhead_fraction"], 1)])
    note = "overhead %: of the time after the prefill, the share of neither target nor drafter"
    return fitted_tables(["method", *phases, "ms/round", "overhead %"], rows) + "\n" + note


def calibration_lines(record: dict[str, Any]) -> str:
    """Return the setting that calibrate chose, and how the promise held on both sets of prompts."""
    lines = [f"{record['promise']['text']}, confidence {record['confidence']:g}: {record['setting']}"]
    for name in ("calibration", "verification"):
        facts = record[name]
        if not facts["prompts"]:
            continue
        parts = [f"{name} on {facts['prompts']} prompts: {'kept' if facts['kept'] else 'NOT kept'}"]
        if facts["score_difference"] is not None:
            parts.append("score " + mean_text(facts["score_difference"], 100.0, 1) + " points")
        parts += [f"speed {ratio_text(facts['speed'])} x", f"tau {ratio_text(facts['tau'])} x"]
        copied, repeated = (100 * facts["rises"][name] for name in ("copied_4grams", "repeated_4grams"))
        parts.append(f"copied 4-grams {copied:+.1f}, repeated {repeated:+.1f} points")
        parts.append("nats {mean:.2f} on average, {most:.2f} at most".format(**facts["nats_per_answer"]))
        lines.append("; ".join(parts))
    lines += [
        f"quality {level['quality']:g}: {level['rule']}, {level['speed']:.2f} x speed" for level in record["levels"]
    ]
    return "\n".join([*lines, f'written to {record["file"]}: rule="calibrated" uses it, quality=Q its levels'])


def estimate_text(planned: Planned, exact: TreeShape, lossy: TreeShape) -> str:
    """Return memory and the parts of an exact round, each with its formula, and the table of devices."""
    parts, work = planned.memory(exact), planned.round(exact)
    lines = [f"{part.name}: {size(part.bytes)} = {part.how}" for part in parts]
    lines.append(f"memory in total: {size(sum(part.bytes for part in parts))}\n")
    for case in work:
        operations = f", {case.times * case.operations / 1e9:.1f} GFLOP"
        lines.append(f"round, {case.name}: {size(case.times * case.bytes)}{operations} = {case.how}")
    sources = "; ".join(f"{device.name}: {device.source}" for device in HARDWARE)
    return "\n".join([*lines, "", table(COLUMNS, by_device(planned, exact, lossy)), "", sources])
