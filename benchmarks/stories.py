"""Which loss trains the better drafter where a lossy rule pays: stories15M towards TinyLlama's own stories.

    python -m benchmarks.stories --target TinyLlama/TinyLlama-1.1B-Chat-v1.0 --drafter Xenova/llama2.c-stories15M \
        --work runs/stories --json benchmarks/results/stories-training.json

The target continues made beginnings; every loss trains the public drafter on what it wrote (equal steps, the learning
rate chosen for `kl_pq` on held-out training beginnings); every drafter is judged on beginnings of other templates,
names and events. `exact` at temperature 0 is replayed on the target's own text, the other rules are decoded. What is
done is kept in --work: a killed run goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.optim import AdamW
from tqdm import tqdm

from benchmarks.beginnings import beginnings
from benchmarks.judge_stories import Judge
from benchmarks.recorded import record_main, settings_of
from fsd_bench.environment import environment
from fsd_infer.files import write_json
from fsd_train.cli import main as fsd_train
from fsd_train.data import AnswersDataModule
from fsd_train.losses import FsdLoss, Loss
from fsd_train.losses.rows import divergence_rows
from fsd_train.models import LMModule, WarmupCosine

_kl_pq = divergence_rows("kl_pq")


class ValueLoss(FsdLoss):
    """The chain of `fsd` with a = E_q[max(0, 1 - price·regret)], what a draft is worth to `tilted` at temperature 0."""

    def __init__(self, price: float = 0.7, anchor: float = 0.1, chunk_size: int | None = None) -> None:
        super().__init__(threshold=0, anchor=anchor, chunk_size=chunk_size)
        self.price = price

    def _rows(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        worth = (1 - self.price * (log_p.amax(-1, keepdim=True) - log_p)).clamp_min(0)
        kept = torch.linalg.vecdot(log_q.exp(), worth)
        return torch.stack([torch.zeros_like(kept), kept, _kl_pq(log_p, log_q)])


ARMS: dict[str, Loss | str] = {
    **{name: name for name in ("kl_qp", "kl_pq", "js", "tv", "lk")},
    "fsd:0.2": FsdLoss(threshold=0.2),
    "fsd:0.4": FsdLoss(threshold=0.4),
    "value:0.7": ValueLoss(0.7),
    "kl_pq@0.8": "kl_pq",  # on the sampled texts alone: the greedy ones run in loops
    "value:0.7@0.8": ValueLoss(0.7),
}
GREEDY = ("tilted:1:floor=0", "fuzzy:js:0.3:novel=3", "tilted:0.7:floor=0", "typical:novel=3")
SAMPLED = ("exact", "fuzzy:js:0.3", "tilted:0.4:floor=0")  # at temperature 0.8
EVERYONE = GREEDY[:2]  # what all drafters are judged by; the rest: --finalists


def make_answers(args: argparse.Namespace) -> None:
    """The target's continuations and features of the training beginnings."""
    prompts = args.work / "beginnings.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in beginnings("train", 2000)))
    answers, features = str(args.work / "answers.jsonl"), str(args.work / "features")
    words = ["regenerate", "--target", args.target, "--prompts", str(prompts), "--raw", "--output", answers]
    words += ["--features", features, "--temperature", "0:0.5", "0.8:0.5", "--seed", "44", "--batch-size", "64"]
    words += ["--limit", str(args.texts)]
    for command in (
        [*words, "--max-new-tokens", "96", "--max-prompt-tokens", "96"],
        ["cache-features", "--target", args.target, "--data", answers, "--output", features],
    ):
        if fsd_train(command):
            raise SystemExit(f"fsd-train {command[0]} failed")


def train(args: argparse.Namespace, arm: str, seed: int, lr: float) -> dict[str, Any]:
    """Train one drafter, export it to --work; its figures on held-out training beginnings."""
    seed_everything(seed, verbose=False)
    knows_the_rule = arm.startswith(("fsd", "value"))
    module = LMModule(
        args.target, args.drafter, loss=ARMS[arm], loss_vocab_size=4096, seed=seed, eval_rules=[],
        unroll_steps=4 if knows_the_rule else 1,
        optimizer=lambda params: AdamW(params, lr=lr, weight_decay=0.0, betas=(0.9, 0.95)),
        lr_scheduler=lambda optimizer: WarmupCosine(optimizer, args.steps // 10),
    )  # fmt: skip
    texts = args.work / "answers.jsonl"
    if "@" in arm:
        lines = texts.read_text().splitlines(keepends=True)
        texts = texts.with_name("answers-sampled.jsonl")
        texts.write_text("".join(line for line in lines if json.loads(line)["temperature"] > 0))
    data = AnswersDataModule(
        [str(texts)], validation_fraction=0.06, max_length=192, batch_tokens=args.batch_tokens,
        features=str(args.work / "features"), seed=seed,
    )  # fmt: skip
    trainer = Trainer(
        max_steps=args.steps, max_epochs=-1, accelerator="cpu", precision="bf16-mixed", gradient_clip_val=1.0,
        logger=False, enable_checkpointing=False, use_distributed_sampler=False, num_sanity_val_steps=0,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    begun = time.perf_counter()
    trainer.fit(module, datamodule=data)
    seconds = time.perf_counter() - begun
    trainer.limit_val_batches = 1.0
    (found,) = trainer.validate(module, datamodule=data, verbose=False)
    module.export(args.work / name_of(arm, seed, lr))
    kept = {key: value for key, value in found.items() if key in ("val_agreement_0", "val_tau", "val_loss")}
    rows = {"texts": len(data.train_set or ()), "held_out": len(data.validation_set or ())}
    return {"arm": arm, "seed": seed, "lr": lr, "steps": args.steps, "seconds": seconds, **rows, **kept}


def name_of(arm: str, seed: int, lr: float) -> str:
    return f"{arm.replace(':', '-')}-{seed}-{lr:g}"


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Everything that is not done yet; returns the record."""
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / "features-complete").exists():
        make_answers(args)
        (args.work / "features-complete").touch()
    kept = args.work / "results.json"
    done: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}

    def once(key: str, make: Callable[..., Any], *values: Any) -> Any:
        if key not in done and args.as_is:
            return None
        if key not in done:
            done[key] = make(*values)
            write_json(kept, done, indent=1)
        return done[key]

    for lr in args.lr:
        once(f"train {name_of('kl_pq', 0, lr)}", train, args, "kl_pq", 0, lr)
    lr = max(args.lr, key=lambda lr: done[f"train {name_of('kl_pq', 0, lr)}"]["val_agreement_0"])
    pairs = [(arm, seed) for seed in range(args.seeds) for arm in args.arms]
    if args.as_is:
        pairs = [pair for pair in pairs if f"train {name_of(*pair, lr)}" in done]
    for arm, seed in tqdm(pairs, desc="drafters"):
        once(f"train {name_of(arm, seed, lr)}", train, args, arm, seed, lr)
    judge: Any = None if args.as_is else Judge(args)
    drafters = {"public": args.drafter, **{f"{a} {s}": str(args.work / name_of(a, s, lr)) for a, s in pairs}}
    record: dict[str, Any] = {}
    settings = [(rule, 0.0) for rule in EVERYONE] + [(rule, 0.8) for rule in SAMPLED] + [(r, 0.0) for r in GREEDY[2:]]
    for name, path in drafters.items():
        replayed = once(f"replay {name}", judge and judge.replay, path)
        if replayed is not None:
            record[name] = {"exact": replayed}
    for chain, (rule, temperature), name in itertools.product(args.chains, settings, drafters):
        key = f"{name} {rule} {temperature:g} {chain}"
        asked = name.split()[0] in args.finalists or (chain == args.chains[0] and rule in EVERYONE)
        if key in done or asked:
            made = once(key, judge and judge.decoded, drafters[name], rule, temperature, chain)
            if made is not None:
                record[name].setdefault(f"{rule} at {temperature:g}", {})[str(chain)] = made
    trained = [value for key, value in done.items() if key.startswith("train ")]
    facts = {"environment": environment(command), "settings": _shown(args), "lr": lr}
    return {**facts, "training": trained, "drafters": record}


def _shown(args: argparse.Namespace) -> dict[str, Any]:
    """The options, models by the last part of their path."""
    return {
        **settings_of(args),
        **{name: Path(getattr(args, name)).name for name in ("target", "drafter", "work", "json")},
    }


def report(record: dict[str, Any]) -> str:
    """A Markdown table: means over seeds; each rule at its best chain, in tokens per cost τ / (1 + c·chain)."""
    ratio = record["settings"]["cost_ratio"]
    arms: dict[str, list[dict[str, Any]]] = {}
    for name, found in record["drafters"].items():
        arms.setdefault(name.split()[0], []).append(found)
    rules = [key for key in next(iter(arms.values()))[0] if key != "exact"]
    lines = [
        "| drafter | first draft agrees | regret: median | below 1 nat | `exact` | "
        + " | ".join(f"`{r}`" for r in rules)
        + " |"
    ]
    lines.append("|---" * (5 + len(rules)) + "|")
    for arm, seeds in arms.items():
        mean = {
            key: statistics.fmean(one["exact"][key] for one in seeds)
            for key in ("first_draft_agreement", "regret_median", "regret_below_1")
        }
        cells = [f"{mean['first_draft_agreement']:.3f} | {mean['regret_median']:.2f} | {mean['regret_below_1']:.2f}"]
        taus = [{chain: [one["exact"]["tau"][chain] for one in seeds] for chain in seeds[0]["exact"]["tau"]}]
        taus += [{c: [one[rule][c]["tau"] for one in seeds] for c in seeds[0].get(rule, {})} for rule in rules]
        for by_chain in taus:
            best = max(((statistics.fmean(t) / (1 + ratio * int(c)), c) for c, t in by_chain.items()), default=(0, "-"))
            cells.append(f"{best[0]:.3f} ({best[1]})" if best[0] else "")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stories", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--target", default="TinyLlama/TinyLlama-1.1B-Chat-v1.0", help="directory or hub id (%(default)s)"
    )
    parser.add_argument("--drafter", default="Xenova/llama2.c-stories15M", help="the public one (%(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/stories"), help="(%(default)s)")
    parser.add_argument("--json", type=Path, default=Path("runs/stories/record.json"), help="(%(default)s)")
    parser.add_argument("--texts", type=int, default=1024, help="training beginnings (%(default)s)")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, help="losses")
    parser.add_argument("--seeds", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="(%(default)s)")
    parser.add_argument("--lr", type=float, nargs="+", default=[2e-4, 5e-4], help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="beginnings to judge by (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each continuation (%(default)s)")
    parser.add_argument("--chains", type=int, nargs="+", default=[8, 4, 12], help="lengths (%(default)s)")
    finalists = ["public", "kl_pq", "value:0.7"]
    parser.add_argument("--finalists", nargs="+", default=finalists, help="judged by all rules and lengths")
    parser.add_argument("--as-is", action="store_true", help="a record of what is done, without the rest")
    parser.add_argument(
        "--cost-ratio", type=float, default=0.06, help="a drafted token / a target forward (%(default)s)"
    )
    return record_main("benchmarks.stories", parser, run, report, argv)


if __name__ == "__main__":
    raise SystemExit(main())
