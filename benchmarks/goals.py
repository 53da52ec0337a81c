"""Which goals for speed and memory a record of `make bench` reaches, as a Markdown table.

Run: python -m benchmarks.goals RECORD.json [RECORD.json ...] [--into PAGE.md]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsd_infer.errors import DataError, FsdError
from fsd_infer.targets.loading import shipped_drafter

LIKELIHOOD_FALL = 0.02  # of the log-likelihood per token of exact's answers, at most
BEGIN, END = "<!-- goals: written by benchmarks/goals.py -->", "<!-- goals: end -->"

Record = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """One row. ``holds`` is None where the record does not tell."""

    what: str
    wanted: str
    reached: str
    holds: bool | None


def goals(record: Record) -> list[Goal]:
    """All goals that the kind of record speaks of: one of `make bench`, or one of batch sizes."""
    if "batches" in record:
        return [_batch(record, size) for size in record["batches"] if size != "1"]
    plain, exact, server = plain_method(record), best_exact(record), best_server(record)
    rows = [_ratio(record, plain, "vllm", 0.9)]
    # a target without a head of its own has less to gain from
    rows.append(_ratio(record, exact, "hf-generate", 3.5 if shipped_drafter(record["settings"]["target"]) else 3.0))
    rows.append(_ratio(record, exact, server, 1.3, "best of vLLM's modes"))
    fuzzy = best_fuzzy(record, exact)
    rows.append(_ratio(record, fuzzy, "hf-generate", 5.0, fall=_fall(record, fuzzy, exact), role="a fuzzy rule"))
    rows.append(_ratio(record, fuzzy, server, 1.8, "best of vLLM's modes", role="a fuzzy rule"))
    told = {name: record["methods"][name].get("round_overhead_fraction") for name in (exact, fuzzy) if name}
    rows.append(_at_most("round time outside forwards and drafter", told, 0.05))
    profile = record.get("profile") or {}
    curve = profile.get("forward_seconds") or {}
    factor = curve["16"] / curve["1"] if {"1", "16"} <= set(curve) else None
    rows.append(
        Goal(
            "verifying forward over 16 nodes / 1 token",
            "≤ 1.3",
            "not measured" if factor is None else f"{factor:.2f} ({1e3 * curve['16']:.1f} / {1e3 * curve['1']:.1f} ms)",
            None if factor is None else factor <= 1.3,
        )
    )
    memory = profile.get("memory") or {}
    above = {profile.get("method", "-"): memory.get("above_weights_and_caches")}
    rows.append(_at_most("peak memory above weights and caches", above, 0.1))
    return rows


def plain_method(record: Record) -> str | None:
    """This package's engine without a drafter."""
    return next((name for name, facts in _ours(record, exact=True) if facts["drafter"]["name"] == "none"), None)


def best_exact(record: Record) -> str | None:
    """The fastest method of this package that drafts and loses nothing."""
    return _fastest((n, f) for n, f in _ours(record, exact=True) if f["drafter"]["name"] != "none")


def best_fuzzy(record: Record, exact: str | None) -> str | None:
    """The fastest lossy method whose answers the target finds likely enough beside those of ``exact``."""
    allowed = []
    for name, facts in _ours(record, exact=False):
        fall = _fall(record, name, exact)
        if fall is not None and fall <= LIKELIHOOD_FALL:
            allowed.append((name, facts))
    return _fastest(allowed)


def best_server(record: Record) -> str | None:
    """The fastest of the servers."""
    return _fastest((name, facts) for name, facts in record["methods"].items() if facts["by"] == "server")


def _ours(record: Record, exact: bool) -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, facts)
        for name, facts in record["methods"].items()
        if facts["by"] == "fsd_infer" and (facts["rule"]["rule"] == "exact") == exact
    ]


def _fastest(methods: Iterable[tuple[str, dict[str, Any]]]) -> str | None:
    rated = [(facts["tokens_per_second"] or 0.0, name) for name, facts in methods]
    return max(rated)[1] if rated else None


def _fall(record: Record, name: str | None, exact: str | None) -> float | None:
    """How much lower the log-likelihood per token is than that of exact's answers, as a share of the latter."""
    if name is None or exact is None:
        return None
    own, reference = (record["methods"][method].get("log_likelihood_per_token") for method in (name, exact))
    return None if own is None or not reference else (reference - own) / abs(reference)


def _ratio(
    record: Record,
    method: str | None,
    baseline: str | None,
    wanted: float,
    said: str = "",
    fall: float | None = None,
    role: str = "this package",
) -> Goal:
    """Speed on the same prompts: median of the pairs with its interval, prefill counted, and without it.

    ``role`` is what is named where no method of the record plays it.
    """
    first, second = f"`{method}`" if method else role, f"`{baseline}`" if baseline else "a server"
    what = f"{first} / {second}" + (f" ({said})" if said else "")
    what += "" if fall is None else f", log-likelihood falls by {max(100 * fall, 0.0):.1f} %"
    found = record["ratios"].get(baseline, {}).get(method) if method is not None and baseline is not None else None
    if found is None or found["tokens_per_second"]["median"] is None:
        return Goal(what, f"≥ {wanted}", "not measured", None)
    whole, decode = found["tokens_per_second"], found["decode_tokens_per_second"]["median"]
    reached = f"{whole['median']:.2f} ({whole['low']:.2f}–{whole['high']:.2f})"
    reached += "" if decode is None else f"; behind the prefill {decode:.2f}"
    return Goal(what, f"≥ {wanted}", reached, whole["median"] >= wanted)


def _at_most(what: str, shares: Mapping[str, float | None], wanted: float) -> Goal:
    """A bound on a share by method; it holds if it holds for every method that tells."""
    told = {name: share for name, share in shares.items() if share is not None}
    what += f" ({', '.join(f'`{name}`' for name in told or shares)})" if shares else ""
    if not told:
        return Goal(what, f"≤ {100 * wanted:.0f} %", "not measured", None)
    reached = ", ".join(f"{100 * share:.1f} %" for share in told.values())
    return Goal(what, f"≤ {100 * wanted:.0f} %", reached, max(told.values()) <= wanted)


def _batch(record: Record, size: str) -> Goal:
    """Throughput of the fastest drafting method against plain, both in batches."""
    part = record["batches"][size]
    exact, plain = best_exact(part), plain_method(part)
    goal = _ratio(part, exact, plain, 1.0, f"batch {size}")
    if exact is None or plain is None or goal.holds is None:
        return goal
    rates = " against ".join(f"{part['methods'][name]['tokens_per_second']:.0f}" for name in (exact, plain))
    return Goal(goal.what, goal.wanted, f"{goal.reached}; {rates} tok/s", goal.holds)


def markdown(record: Record, name: str) -> str:
    """The table, and what it was made from."""
    words: dict[bool | None, str] = {True: "yes", False: "**no**", None: "–"}
    lines = ["| goal | wanted | reached | holds |", "|---|---|---|---|"]
    lines += [f"| {goal.what} | {goal.wanted} | {goal.reached} | {words[goal.holds]} |" for goal in goals(record)]
    settings, machine = record["settings"], record["environment"]
    lines += [
        "",
        f"`{name}`: {settings['target']}, {settings['dtype']}, {settings['limit'] or 'all'} prompts of "
        f"`{settings['prompts']}`, {settings['max_new_tokens']} new tokens, temperature {settings['temperature']:g}, "
        f"{settings['repeat']} repeats; {machine.get('cpu', '?')}, {machine.get('threads')} threads; "
        f"commit {str(machine.get('commit'))[:10]}. `{machine.get('command')}`",
    ]
    return "\n".join(lines)


def read(path: Path) -> Record:
    """A record. Raises DataError if the file is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not ({"methods", "ratios"} <= set(record) or "batches" in record):
            raise ValueError("neither methods and ratios nor batches")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a record of make bench: {error}.") from error
    return record


def print_goals(paths: Sequence[Path], write: Callable[[str], Any] = print) -> None:
    """Their tables, one after the other."""
    write("\n\n".join(markdown(read(path), path.name) for path in paths))


def put_into(page: Path, text: str) -> None:
    """Replace what stands between the two marks of a page. Raises DataError if it has none."""
    content = page.read_text(encoding="utf-8")
    start, end = content.find(BEGIN), content.find(END)
    if start < 0 or end < start:
        raise DataError(f"{page} has no place for the goals: add the lines {BEGIN} and {END}.")
    page.write_text(f"{content[: start + len(BEGIN)]}\n\n{text}\n\n{content[end:]}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, or put them into a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goals", description=__doc__.split("\n\n")[0])
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="Markdown file with a place for the tables")
    args = parser.parse_args(argv)
    try:
        print_goals(args.records, (lambda text: put_into(args.into, text)) if args.into else print)
    except FsdError as error:
        print(f"goals: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
