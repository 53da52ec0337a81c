"""Milliseconds of a training step at a real target's shape, with random weights, by part; tokens per second and MFU.

    python -m benchmarks.train_step --json benchmarks/results/train-step.json
    python -m benchmarks.train_step --shape llama-3.1-8b --device cpu --layers 1 --tokens 256 --steps 1

Batches are packed sequences of random ids, of answers and prompts as long as those of chats. A head of layout eagle3
with one layer is trained as the recipe of Llama-3.1-8B does it. Whole steps are timed first, then steps whose parts
wait for the device:

=========  =============================================================================================================
target     the forward of the frozen target
head       the head's steps, forwards
loss       values and gradients on estimates and LM head
backward   the head's steps, backwards
optimizer  AdamW
=========  =============================================================================================================

Beside a step stand what the host plans before each one, and what interrupts steps now and then: a batch of validation,
an export of the head, and a checkpoint, the latter two to a temporary directory. ``--speculators ENVIRONMENT`` and
``--specforge ENVIRONMENT`` train a head of the same shape on the same sequences with those libraries, which are
installed there. They read features from disk, so their steps compare with ours without the target.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_place import DRAFTED, Place
from benchmarks.peers import HERE, TRAINERS, install
from benchmarks.recorded import parser_of, record_main
from benchmarks.tables import trainer_steps
from fsd_bench.roofline import peak_of
from fsd_core.errors import FsdError
from fsd_core.tables import table
from fsd_infer import Target
from fsd_train.data.packs import collate, keep_on_host, on_host
from fsd_train.models import EagleModule, HeadOptions
from fsd_train.models.unroll import plan_chains
from fsd_train.models.work import real_tokens

PROMPT, ANSWER = 140, 110  # mean tokens of a conversation's prompt and answer
UNROLLED, DECAY = 5, 0.8  # as in recipes/llama-3.1-8b.yaml
PARTS = ("target", "head", "loss", "backward", "optimizer")


class Bench:
    """A head in training with a target of random weights.

    Args:
        shape: as :func:`.planned_target` takes it.
        device: on which both are.
        layers: number of layers of the target; None: the shape's own.
        tokens: length of a packed sequence.
        compile: as for the module.
        drafted: tokens of the draft vocabulary; None: the recipe's, for a target with more than twice as many.
    """

    def __init__(
        self, shape: str, device: str, layers: int | None, tokens: int, compile: bool | None, drafted: int | None
    ) -> None:
        self.place = Place(shape, device, changes={} if layers is None else {"num_hidden_layers": layers})
        self.tokens, self.device, config = tokens, self.place.device, self.place.config
        self.config, self.drafted = config, drafted or (DRAFTED if config.vocab_size > 2 * DRAFTED else None)
        self.fused = sorted({min(2, config.num_hidden_layers - 1), config.num_hidden_layers // 2})
        self.module = EagleModule(
            shape, HeadOptions(layout="eagle3", fused_layers=self.fused), draft_vocab_size=self.drafted,
            loss="kl_pq", unroll_steps=UNROLLED, step_decay=DECAY, compile=compile,
        )  # fmt: skip
        self.module._frozen.target = Target(self.place.model().requires_grad_(False), name=shape)
        self.module.target.capture_layers(self.fused)
        self.module.configure_model()
        self.module.to(self.device)
        self.optimizer = torch.optim.AdamW(self.module.head.parameters(), lr=1e-4)
        self._spent: dict[str, float] | None = None

    def batch(self, seed: int) -> dict[str, Any]:
        """Return a packed sequence of random conversations."""
        random, items, left = torch.Generator().manual_seed(seed), list[dict[str, Any]](), self.tokens
        longest = min(self.tokens, self.module.target.max_positions or self.tokens)
        while left > 8:
            prompt, answer = (int(mean * (0.5 + torch.rand((), generator=random))) for mean in (PROMPT, ANSWER))
            length = min(prompt + answer, left, longest)
            mask = (torch.arange(length) >= min(prompt, length // 2)).long()
            ids = torch.randint(self.module.target.vocab_size, (length,), generator=random)
            items.append({"input_ids": ids, "loss_mask": mask})
            left -= length
        batch = keep_on_host(collate(items, self.tokens))
        return {**batch, **{name: batch[name].to(self.device) for name in ("input_ids", "loss_mask")}}

    def step(self, batch: dict[str, Any]) -> None:
        """Train one step, as a Trainer does it."""
        half = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            with self._part("head"):  # the target's forward is within
                drafts = self.module.draft(batch, UNROLLED)
            with self._part("loss"):
                loss = self.module.loss(drafts).loss
        with self._part("backward"):
            loss.backward()
        with self._part("optimizer"):
            torch.nn.utils.clip_grad_norm_(self.module.head.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def seconds(self, batches: Sequence[dict[str, Any]]) -> float:
        """Return the seconds of a step that waits for nothing between steps."""
        return self.place.seconds(lambda: [self.step(batch) for batch in batches]) / len(batches)

    def by_part(self, batch: dict[str, Any]) -> dict[str, float]:
        """Return the seconds of a step's parts, each of which waits for the device."""
        self._spent, target = dict.fromkeys(PARTS, 0.0), self.module.target
        features: Callable[..., Tensor] = target.features

        def timed(*args: Any, **options: Any) -> Tensor:
            with self._part("target"):
                return features(*args, **options)

        vars(target)["features"] = timed
        try:
            self.step(batch)
        finally:
            del vars(target)["features"]
        spent, self._spent = self._spent, None
        spent["head"] -= spent["target"]
        return spent

    def interruptions(self, batch: dict[str, Any]) -> dict[str, float]:
        """Return the seconds of what happens between steps, each measured until the device is done."""
        module, mask = self.module, on_host(batch, "loss_mask")[0]

        @torch.no_grad()
        def validate() -> None:
            module.eval()
            module.validation_step(batch, 0)
            module.train()

        with TemporaryDirectory() as scratch:
            state = Path(scratch) / "state.ckpt"
            actions: dict[str, Callable[[], Any]] = {
                "plan": lambda: plan_chains(mask, UNROLLED, DECAY, static_shapes=module.is_compiled),
                "validation batch": validate,
                "export": lambda: module.export(Path(scratch) / "head"),
                "checkpoint": lambda: torch.save([module.state_dict(), self.optimizer.state_dict()], state),
            }
            for run in actions.values():  # once before it counts
                run()
            return {name: self.place.seconds(run) for name, run in actions.items()}

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        if self._spent is None:
            yield
            return
        self.place.sync()
        start = time.perf_counter()
        yield
        self.place.sync()
        self._spent[name] += time.perf_counter() - start


def by_trainer(name: str, bench: Bench, batches: Sequence[dict[str, Any]], environment: Path) -> dict[str, Any]:
    """Return the milliseconds of another trainer's step on the same sequences, and how many parameters it trains.

    Raises FsdError with the end of its log if it fails.
    """
    peer = TRAINERS[name]
    job = {
        "config": bench.config.to_dict(), "drafted": bench.drafted, "inputs": len(bench.fused), "unrolled": UNROLLED,
        "decay": DECAY, "device": bench.device.type, "threads": torch.get_num_threads(),
        "batches": [
            {
                "ids": batch["input_ids"][0].tolist(), "mask": batch["loss_mask"][0].tolist(),
                "lengths": batch["lengths"].tolist(),
            }
            for batch in batches
        ],
    }  # fmt: skip
    command = [str(install(peer, environment)), str(HERE / peer.script)]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
    if done.returncode:
        raise FsdError(f"{name} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    seconds = sum(reply.pop("seconds")) / len(batches)
    return {"version": (*peer.bare, *peer.requirements)[0], "ms": 1e3 * seconds, **reply}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a step; return a part of the record."""
    compile = {"auto": None, "on": True, "off": False}[args.compile]
    bench = Bench(args.shape, args.device, args.layers or None, args.tokens, compile, args.drafted or None)
    batches = [bench.batch(seed) for seed in range(args.steps)]
    for batch in batches:  # kernels are made, and all shapes met
        bench.step(batch)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = bench.seconds(batches)
    parts = [bench.by_part(batch) for batch in batches]
    operations = {name: [] for name in ("target", "drafter", "logits")}  # type: dict[str, list[float]]
    for batch in batches:
        for name, value in bench.module.operations(batch).items():
            operations[name].append(value)
    tera = {name: sum(values) / len(values) / 1e12 for name, values in operations.items()}
    real = sum(map(real_tokens, batches)) / len(batches)
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
    peak = peak_of(name)
    trained = sum(weight.numel() for weight in bench.module.head.parameters() if weight.requires_grad)
    environments = {name: getattr(args, name) for name in TRAINERS}
    others = {name: by_trainer(name, bench, batches, Path(path)) for name, path in environments.items() if path}
    return {
        "device": name, "compiled": bench.module.is_compiled, "ms": 1e3 * seconds, "tokens_per_s": real / seconds,
        "fill": real / args.tokens, "mfu": None if peak is None else sum(tera.values()) * 1e12 / seconds / peak,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if bench.device.type == "cuda" else None,
        "teraflop": tera, "parts_ms": {part: 1e3 * median(each[part] for each in parts) for part in PARTS},
        "beside_ms": {name: 1e3 * value for name, value in bench.interruptions(batches[0]).items()},
        "trained_parameters": trained, **others,
    }  # fmt: skip


def report(record: dict[str, Any]) -> str:
    """Return tables of the step and of its parts."""
    facts = {
        "device": record["device"], "compiled": "yes" if record["compiled"] else "no", "step": f"{record['ms']:.1f} ms",
        "tokens per second": f"{record['tokens_per_s']:.0f}", "fill": f"{record['fill']:.3f}",
        "operations": " + ".join(f"{value:.2f} ({name})" for name, value in record["teraflop"].items()) + " TFLOP",
        "MFU": "unknown" if record["mfu"] is None else f"{record['mfu']:.1%}",
        "peak memory": "unknown" if record["peak_gb"] is None else f"{record['peak_gb']:.1f} GB",
    }  # fmt: skip
    if len(compared := trainer_steps(record)) > 1:
        (_, our_ms, _), *_ = compared
        for name, ms, trained in compared:
            title = "step without the target" if name == "here" else f"step of {name}"
            facts[title] = f"{ms:.1f} ms, {trained / 1e6:.1f} M parameters; {ms / our_ms:.2f} times"
    tables = [table(["what", "measured"], [[*each] for each in facts.items()])]
    for title in ("parts_ms", "beside_ms"):
        tables.append(
            table([title.removesuffix("_ms"), "ms"], [[name, f"{ms:.1f}"] for name, ms in record[title].items()])
        )
    return "\n\n".join(tables)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = parser_of(
        "benchmarks.train_step", __doc__, shape=("llama-3.1-8b", "name of a shape, or a directory with a config.json"),
        device=(device, "cuda or cpu"), layers=(0, "layers of the target, for a smaller machine; 0: all"),
        tokens=(8192, "tokens of a packed sequence"), steps=(5, "timed steps, each of another batch"),
        compile=("auto", "model.compile: auto, on or off"),
        drafted=(0, "tokens of the draft vocabulary; 0: as the recipe has it"),
        **{name: ("", f"environment with {name}, made if missing") for name in TRAINERS}, json=None,
    )  # fmt: skip
    return record_main("benchmarks.train_step", parser, measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
