"""Compare this package with transformers, vLLM, llama.cpp and OpenVINO on the same prompts: `make bench`.

    python -m benchmarks.compare [--target NAME_OR_DIRECTORY] [--drafter HEAD] [--assistant DIRECTORY] [--gguf FILE]

Writes benchmarks/results/compare-TARGET.json. Every method answers in its own process while no other one runs, and
the methods take turns block by block. The other engines have their own environments, made on the first run. An
engine that cannot be installed is left out with a line. The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import FILES, PEERS, prepare
from benchmarks.peers.gguf_files import TYPES, converted
from benchmarks.recorded import BUILT_IN, PROMPTS, ROOT, parser_of, run_resumed
from benchmarks.workplace import Workplace, shown_command
from fsd_bench import parse_methods
from fsd_bench.report import bench_table
from fsd_core.errors import FsdError
from fsd_core.files import writable
from fsd_infer.targets.builtin import BUILTIN_TARGETS, fetch_gguf, is_builtin, shipped_drafter
from fsd_infer.targets.loading import resolve_target
from fsd_infer.trees.shape import parse_tree

PEER_METHODS = [f"{name}:{mode}" if mode else name for name, peer in PEERS.items() for mode in peer.modes]


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = parser_of(
        "benchmarks.compare", __doc__, target=BUILT_IN, drafter=(None, "head of the target (default: the shipped one)"),
        assistant=(None, "directory of a small model with the target's vocabulary"),
        gguf=(None, "the target for llama.cpp and OpenVINO (default: the built-in one's file)"), prompts=PROMPTS,
        limit=24, every=10, max_new_tokens=64, repeat=1, blocks=6,
        thresholds=("0.1,0.3", "thresholds of js for the fuzzy rule"),
        tree=("auto", "tree of heads, as `fsd-bench run` takes it"),
        methods=(None, "methods of this package and transformers (default: all that the target has drafters for)"),
        peers=(",".join(PEER_METHODS), "other engines; '': none"),
        output=(ROOT / "benchmarks" / "results", "directory of the record"), threads=os.cpu_count() or 1,
    )  # fmt: skip
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="NAME=PYTHON", help="environment that has the engine"
    )
    return parser


def own_methods(target: str, drafter: str | None, assistant: str | None, thresholds: Sequence[str]) -> list[str]:
    """Return the methods of this package and of transformers that the target has drafters for."""
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
    """Return the record's path."""
    name = Path(os.path.abspath(args.target)).name  # also of "." and of a path that ends in "/"
    return args.output.resolve() / f"compare-{name}.json"


def target_files(args: argparse.Namespace, work: Workplace, forms: set[str]) -> dict[str, str]:
    """Return the target's files by form, as named in the workplace. GGUF files are made there once."""
    files = {"directory": work.link(resolve_target(args.target))}
    if not forms - {"directory"} or args.gguf is None and not is_builtin(args.target):
        return files
    gguf = args.gguf and Path(args.gguf)
    if gguf is None:
        gguf = work.directory / f"{args.target}.gguf"
        if not gguf.is_file():
            fetch_gguf(BUILTIN_TARGETS.get(args.target), gguf, _say)
    files["gguf"] = work.link(gguf)
    for name in forms & set(TYPES):
        files[name] = converted(gguf, name, work.directory / f"{Path(files['gguf']).stem}-{name}.gguf").name
    return files


def peer_methods(args: argparse.Namespace, work: Workplace) -> list[str]:
    """Return the methods of ``--peers`` that this machine can run. Raises FsdError for an unknown one."""
    peers = [text for text in args.peers.split(",") if text]
    unknown = sorted(set(peers) - set(PEER_METHODS))
    if unknown:
        raise FsdError(f"--peers: unknown {unknown[0]!r}. Known: {', '.join(PEER_METHODS)}.")
    if not peers:
        return []
    pythons = {
        name: Path(os.path.abspath(path)) for name, _, path in (text.partition("=") for text in args.peer_python)
    }
    words = {word for text in peers for word in PEERS[text.partition(":")[0]].modes[text.partition(":")[2]]}
    files = target_files(args, work, {form for form in FILES if f"{{{form}}}" in words})
    return prepare(peers, ROOT, pythons, files, args.threads)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything. Return 2 after bad input and 130 after an interrupt."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    try:
        return _run(args, argv)
    except FsdError as error:
        _say(f"bench: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted: the same command continues after the last finished answer.")
        return 130


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    record = writable(record_path(args), "the record")
    work = Workplace(ROOT / "runs" / record.stem)
    target, prompts = work.link(args.target), work.link(args.prompts)
    drafter, assistant = (path and work.link(path) for path in (args.drafter, args.assistant))
    thresholds = [text for text in args.thresholds.split(",") if text]
    methods = args.methods.split(",") if args.methods else own_methods(args.target, drafter, assistant, thresholds)
    peers = peer_methods(args, work)
    os.chdir(work.directory)
    names = [spec.name for spec in parse_methods([*methods, *peers])]
    result = run_resumed(
        prompts, [*methods, *peers], record,
        command=shown_command("benchmarks.compare", argv), target=target, drafter=drafter, tree=parse_tree(args.tree),
        limit=args.limit, every=args.every, max_new_tokens=args.max_new_tokens, repeat=args.repeat,
        threads=args.threads, log_likelihood=True, isolate=args.blocks,
        baselines=[name for name in ("hf-generate", "vllm", "plain") if name in names],
    )  # fmt: skip
    print(bench_table(result))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
