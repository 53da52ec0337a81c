"""One interleaved run of this package, transformers and vLLM on the same prompts: `make bench`.

Writes benchmarks/results/compare-TARGET.json. vLLM lives in an environment of its own, made on the first run; where it
cannot be installed or started, one line says so and the others are measured.

Run: python -m benchmarks.compare [--target NAME_OR_DIRECTORY] [--drafter HEAD] [--assistant DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.vllm_server import NGRAM, ServerProcess, Unavailable, install, serve_command, serve_environment
from fsd_infer.errors import FsdError

ROOT = Path(__file__).resolve().parent.parent
SERVERS: dict[str, dict[str, Any] | None] = {"vllm": None, "vllm-ngram": NGRAM}


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--drafter", help="head of the target (default: the one shipped with it)")
    parser.add_argument("--assistant", metavar="DIR", help="small model of the target's vocabulary")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "spec_bench_dev.jsonl")
    parser.add_argument("--limit", type=int, default=8, help="prompts (%(default)s)")
    parser.add_argument("--every", type=int, default=30, help="each so-many-th row (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--methods", help="of ours and transformers' (default: all that the target has drafters for)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="directory of the record")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    parser.add_argument("--vllm-env", type=Path, default=ROOT / ".venv-vllm", help="made if it is not there")
    parser.add_argument("--vllm-python", type=Path, help="python of an environment that has vLLM; nothing is installed")
    parser.add_argument("--port", type=int, default=18460, help="of the first server (%(default)s)")
    parser.add_argument("--start-seconds", type=float, default=900, help="a server may take to start (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of all (%(default)s)")
    return parser


def own_methods(target: str, drafter: str | None, assistant: str | None) -> list[str]:
    """Methods of this package and of transformers, as far as there are drafters for the target."""
    from fsd_infer.models import shipped_drafter

    methods = ["hf-generate", "hf-lookup:8"]
    methods += [f"hf-assisted=hf-assisted:{assistant}"] if assistant else []
    methods += ["plain", "lookup=exact@lookup"]
    if drafter or shipped_drafter(target):
        methods += ["exact", f"exact+lookup=exact@{drafter or 'shipped'}+lookup", "fuzzy:js:0.3"]
        methods += [f"fuzzy+lookup=fuzzy:js:0.3@{drafter or 'shipped'}+lookup"]
    if assistant:
        methods += [f"assistant=exact@{assistant}", f"assistant+lookup=exact@{assistant}+lookup"]
    return methods


def bench_command(args: argparse.Namespace, methods: Sequence[str], baselines: Sequence[str]) -> list[str]:
    """`fsd-infer bench` for this run; continues an unfinished one."""
    record = args.output / f"compare-{Path(args.target).name}.json"
    command = [str(Path(sys.executable).with_name("fsd-infer")), "bench", "--prompts", str(args.prompts)]
    command += ["--limit", str(args.limit), "--every", str(args.every), "--max-new-tokens", str(args.max_new_tokens)]
    command += ["--repeat", str(args.repeat), "--target", args.target, "--dtype", "bf16", "--log-likelihood"]
    command += ["--drafter", args.drafter] if args.drafter else []
    command += ["--threads", str(args.threads), "--methods", ",".join(methods), "--json", str(record)]
    command += ["--baseline", ",".join(baselines)] if baselines else []
    return command + (["--resume"] if record.with_name(record.name + ".partial.jsonl").exists() else [])


def start_servers(args: argparse.Namespace, stack: ExitStack) -> list[str]:
    """Methods for the servers that could be started; the others are told on stderr in one line each."""
    import torch

    from fsd_infer.models import resolve_target

    cuda = torch.cuda.is_available()
    try:
        python = args.vllm_python or install(args.vllm_env, cuda)
    except Unavailable as error:
        _say(f"vLLM is left out: {error}")
        return []
    model, methods = Path(resolve_target(args.target)), []
    for port, (name, speculation) in enumerate(SERVERS.items(), args.port):
        command = serve_command(python, model, port, cuda, speculation)
        log = ROOT / "runs" / f"{name}.log"
        _say(f"starting {name} on port {port} (output: {log}) ...")
        try:
            stack.enter_context(ServerProcess(command, port, log, args.start_seconds, serve_environment(args.threads)))
        except Unavailable as error:
            _say(f"{name} is left out: {error}")
            continue
        methods.append(f"{name}=server:http://127.0.0.1:{port}")
    return methods


def main(argv: Sequence[str] | None = None) -> int:
    """Start servers, measure, stop servers. The status is that of `fsd-infer bench`; 130 after an interrupt."""
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops servers as an interrupt does
    try:
        with ExitStack() as stack:
            methods = (
                args.methods.split(",") if args.methods else own_methods(args.target, args.drafter, args.assistant)
            )
            servers = [] if args.no_vllm else start_servers(args, stack)
            baselines = [] if not servers else [name for name in methods if name in ("hf-generate", "plain")]
            baselines += [server.partition("=")[0] for server in servers]
            return subprocess.run(bench_command(args, [*methods, *servers], baselines), check=False).returncode
    except FsdError as error:
        _say(f"bench: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted; servers are stopped. The same command goes on from the last finished turn.")
        return 130


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
