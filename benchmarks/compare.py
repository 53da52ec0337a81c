"""One interleaved run of this package, transformers and vLLM on the same prompts: `make bench`.

Writes benchmarks/results/compare-TARGET.json and prints which goals it reaches. vLLM lives in an environment of its
own, made on the first run; where it cannot be installed or started, one line says so and the others are measured.
Then, without the servers, memory and the cost of a forward, and batches (benchmarks/batch_throughput.py) are measured.

Run: python -m benchmarks.compare [--target NAME_OR_DIRECTORY] [--drafter HEAD] [--assistant DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.goals import print_goals
from benchmarks.vllm_server import (
    NGRAM,
    ServerProcess,
    Unavailable,
    install,
    serve_command,
    serve_environment,
    version_of,
)
from benchmarks.workplace import Workplace, shown_command
from fsd_infer.bench import parse_methods
from fsd_infer.drafters.loading import FREE
from fsd_infer.errors import FsdError
from fsd_infer.files import write_json

ROOT = Path(__file__).resolve().parent.parent
BUILT_IN = "smollm2-135m"
IDLE = 0.05  # share of a core that a waiting server may take without a word
SERVERS: dict[str, dict[str, Any] | None] = {"vllm": None, "vllm-ngram": NGRAM}


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default=BUILT_IN, help="(%(default)s)")
    parser.add_argument("--drafter", help="head of the target (default: the one shipped with it)")
    parser.add_argument("--assistant", metavar="DIR", help="small model of the target's vocabulary")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "spec_bench_dev.jsonl")
    parser.add_argument("--limit", type=int, default=8, help="prompts (%(default)s)")
    parser.add_argument("--every", type=int, default=30, help="each so-many-th row (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--thresholds", default="0.1,0.3", help="of js, for the fuzzy rule (%(default)s)")
    parser.add_argument("--tree", default="auto", help="of heads, as for `fsd-infer bench` (%(default)s)")
    parser.add_argument("--methods", help="of ours and transformers' (default: all that the target has drafters for)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="directory of the record")
    parser.add_argument("--no-profile", action="store_true", help="leave out memory and the cost of a forward")
    parser.add_argument("--no-batches", action="store_true", help="leave out the throughput of batches")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    parser.add_argument("--vllm-env", type=Path, default=ROOT / ".venv-vllm", help="made if it is not there")
    parser.add_argument("--vllm-python", type=Path, help="python of an environment that has vLLM; nothing is installed")
    parser.add_argument("--port", type=int, default=18460, help="of the first server (%(default)s)")
    parser.add_argument("--start-seconds", type=float, default=900, help="a server may take to start (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of all (%(default)s)")
    return parser


def own_methods(target: str, drafter: str | None, assistant: str | None, thresholds: Sequence[str]) -> list[str]:
    """Methods of this package and of transformers, as far as there are drafters for the target."""
    from fsd_infer.targets.loading import shipped_drafter

    methods = ["hf-generate", "hf-lookup:8"]
    methods += [f"hf-assisted=hf-assisted:{assistant}"] if assistant else []
    methods += ["plain", "exact@lookup", "exact@lookup+recycle"]
    if drafter or shipped_drafter(target):
        grafted = f"{drafter or 'shipped'}+lookup"
        methods += ["exact", f"exact+lookup=exact@{grafted}"]
        methods += [f"js {threshold}+lookup=fuzzy:js:{threshold}@{grafted}" for threshold in thresholds]
    if assistant:
        methods += [f"exact@{assistant}", f"exact@{assistant}+lookup"]
    return methods


def record_path(args: argparse.Namespace) -> Path:
    """Where the record goes."""
    name = Path(os.path.abspath(args.target)).name  # also of "." and of a path that ends in "/"
    return args.output / f"compare-{name}.json"


def bench_command(
    args: argparse.Namespace, work: Workplace, methods: Sequence[str], baselines: Sequence[str]
) -> list[str]:
    """`fsd-infer bench` for this run, to be started in the workplace; continues an unfinished one."""
    args.output.mkdir(parents=True, exist_ok=True)
    record = record_path(args)
    inside = Path(work.link(args.output)) / record.name
    command = [os.path.abspath(Path(sys.executable).with_name("fsd-infer")), "bench"]
    command += ["--prompts", work.link(args.prompts), "--limit", str(args.limit), "--every", str(args.every)]
    command += ["--max-new-tokens", str(args.max_new_tokens), "--repeat", str(args.repeat)]
    command += ["--target", work.link(args.target), "--dtype", "bf16", "--log-likelihood"]
    command += ["--drafter", work.link(args.drafter)] if args.drafter else []
    command += ["--tree", args.tree, "--threads", str(args.threads), "--methods", ",".join(methods)]
    command += ["--json", str(inside)]
    command += ["--baseline", ",".join(baselines)] if baselines else []
    return command + (["--resume"] if record.with_name(record.name + ".partial.jsonl").exists() else [])


def batch_methods(methods: Sequence[str]) -> list[str]:
    """Those to measure in batches: plain decoding and exact drafting, with models where there are any.

    Empty where either kind is missing: there is nothing to compare.
    """
    specs = {text: parse_methods([text])[0] for text in methods}
    plain = [text for text, spec in specs.items() if spec.kind == "plain"]
    exact = [text for text, spec in specs.items() if spec.kind == "exact" and spec.drafter != "none"]
    modelled = [text for text in exact if not set((specs[text].drafter or "shipped").split("+")) <= set(FREE)]
    return plain + (modelled or exact) if plain and exact else []


def batch_command(args: argparse.Namespace, work: Workplace, methods: Sequence[str]) -> list[str]:
    """`benchmarks.batch_throughput` on twice as many prompts, to be started in the workplace."""
    count = 2 * args.limit
    of_target = record_path(args).stem.removeprefix("compare")
    name = "batch-throughput" + ("" if of_target == f"-{BUILT_IN}" else of_target)
    command = [os.path.abspath(sys.executable), "-m", "benchmarks.batch_throughput"]
    command += ["--prompts", work.link(args.prompts), "--limit", str(count), "--every", str(max(args.every // 2, 1))]
    command += ["--sizes", ",".join(str(size) for size in (1, 2, 4, 8) if count % size == 0)]
    command += ["--max-new-tokens", str(args.max_new_tokens), "--tree", args.tree, "--threads", str(args.threads)]
    command += ["--target", work.link(args.target), "--methods", ",".join(methods)]
    command += ["--drafter", work.link(args.drafter)] if args.drafter else []
    return [*command, "--json", str(Path(work.link(args.output)) / f"{name}.json")]


def start_servers(args: argparse.Namespace, stack: ExitStack) -> dict[str, dict[str, Any]]:
    """Those that could be started, by method; the others are told on stderr in one line each.

    Returns:
        ``{"vllm=server:URL": facts for the record}``
    """
    import torch

    from fsd_infer.targets.loading import resolve_target

    cuda = torch.cuda.is_available()
    try:
        python = args.vllm_python or install(args.vllm_env, cuda)
    except Unavailable as error:
        _say(f"vLLM is left out: {error}")
        return {}
    model, started = Path(resolve_target(args.target)), {}
    environment, version = serve_environment(args.threads, None if cuda else python), version_of(python)
    for port, (name, speculation) in enumerate(SERVERS.items(), args.port):
        command = serve_command(python, model, port, cuda, speculation)
        log = ROOT / "runs" / f"{name}.log"
        _say(f"starting {name} on port {port} (output: {log}) ...")
        try:
            server = stack.enter_context(ServerProcess(command, port, log, args.start_seconds, environment))
        except Unavailable as error:
            _say(f"{name} is left out: {error}")
            continue
        idle = server.idle_share()
        if idle is not None and idle > IDLE:
            _say(f"{name} takes {100 * idle:.0f} % of a core while nobody asks it, which slows every other method.")
        options = shlex.join(command[command.index("--dtype") :])
        facts = {"version": version, "options": options, "idle_share_of_a_core": idle}
        started[f"{name}=server:http://127.0.0.1:{port}"] = facts
    return started


def add_facts(record: Path, argv: Sequence[str], servers: dict[str, dict[str, Any]]) -> None:
    """Tell in a finished record by which command and against which servers it was made."""
    content = json.loads(record.read_text(encoding="utf-8"))
    environment = content["environment"]
    environment["bench_command"] = environment.get("command")
    environment["command"] = shlex.join(shown_command("benchmarks.compare", argv))
    environment["servers"] = {method.partition("=")[0]: facts for method, facts in servers.items()}
    write_json(record, content, indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Start servers, measure, stop servers. The status is that of `fsd-infer bench`; 130 after an interrupt."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops servers as an interrupt does
    try:
        return _run(args, argv)
    except FsdError as error:
        _say(f"bench: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted; servers are stopped. The same command goes on from the last finished turn.")
        return 130


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    record = record_path(args)
    work = Workplace(ROOT / "runs" / record.stem)
    with ExitStack() as stack:
        drafter, assistant = (path and work.link(path) for path in (args.drafter, args.assistant))
        thresholds = [text for text in args.thresholds.split(",") if text]
        methods = args.methods.split(",") if args.methods else own_methods(args.target, drafter, assistant, thresholds)
        servers = {} if args.no_vllm else start_servers(args, stack)
        baselines = [] if not servers else [name for name in methods if name in ("hf-generate", "plain")]
        baselines += [server.partition("=")[0] for server in servers]
        command = bench_command(args, work, [*methods, *servers], baselines)
        status = subprocess.run(command, check=False, cwd=work.directory).returncode
    if status != 0:
        return status
    add_facts(record, argv, servers)
    if not args.no_profile:  # by itself, now that the servers' memory is free
        command = [os.path.abspath(sys.executable), "-m", "fsd_infer.bench.profile", str(record.resolve())]
        subprocess.run(command, check=False, cwd=work.directory)
    print_goals([record])
    batched = [] if args.no_batches else batch_methods(methods)
    if not batched:
        return 0
    _say("measuring batches ...")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # of the package benchmarks
    command, environment = batch_command(args, work, batched), {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, check=False, cwd=work.directory, env=environment).returncode


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
