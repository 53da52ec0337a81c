"""Force each deviation of a lossy rule alone, and see whether the answer's score changes.

    python -m benchmarks.forced --prompts made-instructions.jsonl --work runs/forced.jsonl --json forced.json

Exact decoding is watched round by round, and `tilted` with several KL coefficients says which draft it would emit in
place of the target's choice. Each such draft is forced alone: the answer up to it, the draft, then exact decoding to
the end. Scores are those of IFEval's checkers. So the record says which facts that are known when the draft is verified
separate harmless deviations from harmful ones, and what each kind of promise keeps at equal gain:

========================  ==========================================================================================
promise                   a deviation passes while
========================  ==========================================================================================
KL coefficient λ          1 + run > λ·gap
hard budget B             the answer's gaps sum to at most B
growing budget b          they sum to at most b per token so far
cap g                     its gap is at most g
count m                   the answer has fewer than m
toll λ                    1 + run - 1 > λ·gap
========================  ==========================================================================================

gap is ``logprob_gap``, ln p of the target's choice less ln p of the deviation. run is how many drafts below the
deviation are the target's own choices, so its gain is 1 + run. The answers are right ones of exact decoding, and can
only get worse: regression to the mean makes any change look harmful, so compare kinds of deviations with each other,
not with unchanged answers. ``control`` forces the target's own choice: what changes then is due to the order of bf16
sums in batches.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.recorded import BUILT_IN, parser_of, record_main
from fsd_bench.intervals import mean_interval
from fsd_bench.score import read_references
from fsd_bench.trials import decoding
from fsd_bench.worth.replay import ExactRound
from fsd_bench.worth.watch import Watch
from fsd_core.files import append_json
from fsd_core.tables import number, table
from fsd_core.text.encoding import read_prompts
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import TreeShape
from fsd_infer.rules import TokenOrigin, apply_rules, parse_rule
from fsd_infer.rules.texts import sentence_ends

KL_COEFS = (4, 2, 1.2, 0.7)
MIN_KL_COEF = 1.2  # drafts that only a lower one emits are not forced
TREE = TreeShape(depth=6, width=2, nodes=12)
Select = Callable[[dict[str, Any], float, int], bool]  # deviation, nats spent before, deviations before
PROMISES: dict[str, tuple[Sequence[float], Callable[[float], Select]]] = {
    "KL coefficient": ((1.2, 1.5, 2, 3, 4, 6, 8, 12), lambda x: lambda d, spent, n: gain(d) > x * d["logprob_gap"]),
    "hard budget": ((0.25, 0.5, 1, 2, 3, 4, 6, 8), lambda x: lambda d, spent, n: spent + d["logprob_gap"] <= x),
    "growing budget": (
        (0.01, 0.02, 0.03, 0.04, 0.06, 0.1), lambda x: lambda d, spent, n: spent + d["logprob_gap"] <= x * d["at"],
    ),
    "cap": ((0.13, 0.25, 0.38, 0.5, 0.75, 1, 1.4), lambda x: lambda d, spent, n: d["logprob_gap"] <= x),
    "count": ((1, 2, 3, 4, 6, 8), lambda x: lambda d, spent, n: n < x),
    "toll": ((1.2, 1.5, 2, 3, 4, 6), lambda x: lambda d, spent, n: gain(d) - 1 > x * d["logprob_gap"]),
}  # fmt: skip
GAINS = (0.3, 0.5, 0.7)  # shares of the gain of KL coefficient 2


def gain(deviation: dict[str, Any]) -> int:
    """Return how many drafts a deviation wins alone."""
    return 1 + int(deviation["run"])


def deviations(seen: ExactRound) -> list[dict[str, Any]]:
    """Return what `tilted` would emit in a round of exact decoding in place of the target's choice."""
    rules = [parse_rule(f"tilted:{coef}:min_p=0.02") for coef in KL_COEFS]
    all_nodes = tuple(range(len(seen.parents)))
    inputs, _ = seen.narrowed([all_nodes] * len(rules))
    verdict, highest_coef = apply_rules(rules, inputs), dict[tuple[int, int], float]()  # by (node, child)
    for row, coef in enumerate(KL_COEFS):
        path, sources = verdict.path[row].tolist(), verdict.sources[row].tolist()
        for step in range(int(verdict.accepted[row]) + 1):
            if sources[step] == TokenOrigin.GATE:
                edge = path[step], path[step + 1]
                highest_coef[edge] = max(highest_coef.get(edge, 0.0), coef)
                break
    return [_described(seen, *edge, coef) for edge, coef in highest_coef.items() if coef >= MIN_KL_COEF]


def _described(seen: ExactRound, node: int, child: int, kl_coef: float) -> dict[str, Any]:
    log_p = seen.logits[0].float().log_softmax(-1)
    token, here, run, below = seen.tokens[child], log_p[node], 0, child
    while agreeing := [c for c in seen.children.get(below, ()) if seen.tokens[c] == int(log_p[below].argmax())]:
        run, below = run + 1, agreeing[0]
    return {
        "place": len(seen.text) + seen.depths[node], "token": token, "choice": int(here.argmax()), "kl_coef": kl_coef,
        "logprob_gap": float(here.max() - here[token]), "p": float(here[token].exp()), "run": run,
        "entropy": float(-(here.exp() * here).nan_to_num(0.0).sum()), "rank": int((here > here[token]).sum()),
        "next_p": float(log_p[child].max().exp()),
    }  # fmt: skip


def kind_of(piece: str) -> str:
    """Return "word" for a lower-case word after a blank, else what else a token is."""
    text = piece.strip(" ")
    if "\n" in piece or not text or text.startswith("<|"):
        return "form"
    return ("word" if piece[:1] == " " and text.islower() else "part") if text.isalpha() else "sign"


def force(decoder: FuzzyDecoder, prompt: str, score: Callable[[str], float], max_tokens: int) -> dict[str, Any]:
    """Return a prompt's line: its answer's score, and each deviation with the score of the answer that it leads to."""
    watched: list[dict[str, Any]] = []
    watch = Watch(lambda seen: watched.extend(deviations(seen)), 0.0, max_tokens, torch.Generator().manual_seed(0), {})
    options = decoding(0.0, max_tokens)
    exact = decoder.generate([prompt], callbacks=[watch], seed=0, apply_chat_template=True, **options)
    ids, answer = decoder.encode(prompt, True), exact.sequences[0]
    for deviation in watched:
        deviation["at"] = deviation["place"] - len(ids)
    emitted = [d for d in watched if 0 < d["at"] < len(answer) and answer[d["at"]] == d["choice"]]
    control = [{**deviation, "token": deviation["choice"]} for deviation in emitted[:1]]
    forced = [*emitted, *control]
    prefixes = [[*answer[: deviation["at"]], deviation["token"]] for deviation in forced]
    longest = max((max_tokens - len(prefix) for prefix in prefixes), default=0)
    rest = [[] for _ in prefixes]
    if longest > 0:
        rest = decoder.generate([[*ids, *prefix] for prefix in prefixes], **decoding(0.0, longest)).sequences
    ends = sentence_ends(decoder.tokenizer.get_vocab())
    for deviation, prefix, suffix in zip(forced, prefixes, rest, strict=True):
        ended = deviation["token"] == decoder.tokenizer.eos_token_id
        text = prefix if ended else [*prefix, *suffix][:max_tokens]
        deviation["score"] = score(decoder.tokenizer.decode(text, skip_special_tokens=True))
        closed = [index for index, token in enumerate(answer[: deviation["at"]], 1) if ends[token]]
        deviation["sentence"] = deviation["at"] - (closed[-1] if closed else 0)
        deviation["kinds"] = [kind_of(decoder.tokenizer.decode([deviation[name]])) for name in ("choice", "token")]
        del deviation["place"], deviation["token"], deviation["choice"]
    return {"score": score(exact.texts[0]), "tokens": len(answer), "deviations": emitted, "control": control}


def by_feature(right: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return by feature and value how many deviations from right answers there are, and the share that is harmful."""
    features: dict[str, Callable[[dict[str, Any]], Any]] = {
        "logprob_gap": lambda d: min(int(2 * d["logprob_gap"]) / 2, 1.5), "run": lambda d: min(d["run"], 3),
        "entropy": lambda d: min(int(d["entropy"]), 5), "rank": lambda d: min(d["rank"], 3),
        "next_p": lambda d: int(4 * min(d["next_p"], 0.99)) / 4, "at": lambda d: min(d["at"] // 16 * 16, 96),
        "both words": lambda d: d["kinds"] == ["word", "word"], "sentence": lambda d: min(d["sentence"] // 4 * 4, 16),
    }  # fmt: skip
    harmful: dict[str, Any] = {}
    for name, value in features.items():
        groups: dict[Any, list[tuple[float, float]]] = {}
        for deviation in right:
            groups.setdefault(value(deviation), []).append((1.0 - deviation["score"], 1.0))
        harmful[name] = {str(key): mean_interval(groups[key], seed=seed) for key in sorted(groups)}
    return harmful


def gain_and_harm(answers: Sequence[Sequence[dict[str, Any]]], select: Select) -> tuple[int, int]:
    """Return the gain of the deviations that a promise lets pass in the answers, and how many of these are harmful."""
    total_gain = harmful = 0
    for answer in answers:
        spent, passed = 0.0, 0
        for deviation in sorted(answer, key=lambda d: d["at"]):
            if select(deviation, spent, passed):
                total_gain, harmful = total_gain + gain(deviation), harmful + (deviation["score"] < 1)
                spent, passed = spent + deviation["logprob_gap"], passed + 1
    return total_gain, harmful


def promises(answers: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return by promise its points, and its harm at equal gain; both as multiples of those of KL coefficient 2."""
    base = gain_and_harm(answers, lambda d, spent, n: gain(d) > 2 * d["logprob_gap"] and d["logprob_gap"] < 1.39)
    results = {}
    for name, (values, select_for) in PROMISES.items():
        points = [[x, *(a / b for a, b in zip(gain_and_harm(answers, select_for(x)), base))] for x in values]
        gains, harms = zip((0.0, 0.0), *sorted((gained, harm) for _, gained, harm in points))
        results[name] = {"points": points, "harm": {str(g): float(np.interp(g, gains, harms)) for g in GAINS}}
    return results


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the record. Raises FsdError."""
    rows = [row for file in args.prompts for row in read_prompts(file)]
    references, decoder = read_references(rows, "ifeval"), None
    lines = args.work.read_text("utf-8").replace('"regret":', '"logprob_gap":') if args.work.exists() else ""
    finished = [json.loads(line) for line in lines.splitlines()]  # earlier versions wrote "regret"
    lines = {line["id"]: line for line in finished}
    for index, (row, reference) in enumerate(zip(rows, references)):
        if row.id in lines or reference is None or args.limit is not None and index >= args.limit:
            continue
        decoder = decoder or FuzzyDecoder.from_pretrained(args.target, tree=TREE)
        line = {"id": row.id, **force(decoder, row.messages[-1]["content"], reference.score, args.max_new_tokens)}
        append_json(args.work, line)
        lines[row.id] = line
    return summary(list(lines.values()), args.seed)


def summary(lines: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return what is measured: counts, harm by feature and promise on right answers, gains on wrong ones."""
    answers = {score: [line["deviations"] for line in lines if line["score"] == score] for score in (1.0, 0.0)}
    right, wrong = ([deviation for answer in answers[score] for deviation in answer] for score in (1.0, 0.0))
    control = [deviation for line in lines if line["score"] == 1 for deviation in line["control"]]
    share = {name: [(float(value(deviation)), 1.0) for deviation in group] for name, group, value in (
        ("harmful", right, lambda d: d["score"] < 1), ("helpful", wrong, lambda d: d["score"] == 1),
        ("control harmful", control, lambda d: d["score"] < 1),
    )}  # fmt: skip
    return {
        "answers": {"right": len(answers[1.0]), "wrong": len(answers[0.0])},
        "shares": {name: mean_interval(pairs, seed=seed) for name, pairs in share.items() if pairs},
        "harmful": by_feature(right, seed), "promises": promises(answers[1.0]),
    }  # fmt: skip


def report(record: dict[str, Any]) -> str:
    """Return the tables."""
    rows = [
        [f"{name} {value}", str(share["prompts"]), *(number(share[key]) for key in ("mean", "low", "high"))]
        for name, values in {"": record["shares"], **record["harmful"]}.items()
        for value, share in values.items()
    ]
    harms = [[name, *(number(result["harm"][str(g)]) for g in GAINS)] for name, result in record["promises"].items()]
    harm = table(["deviation", "count", "harmful", "low", "high"], rows)
    return harm + "\n\n" + table(["promise, harm at gain", *map(str, GAINS)], harms)


def main(argv: Sequence[str] | None = None) -> int:
    """Force deviations and write the record. Return 2 after bad input."""
    parser = parser_of(
        "benchmarks.forced", __doc__, target=BUILT_IN, limit=None, max_new_tokens=128, seed=1,
        work=(Path("runs/forced.jsonl"), "file of finished prompts, where the same command continues"), json=...,
    )  # fmt: skip
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="files of prompts for IFEval's checkers")
    return record_main("benchmarks.forced", parser, measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
