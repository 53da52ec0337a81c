"""A head of ours in vLLM beside the same head here: answers, acceptance by position, logits.

    python -m benchmarks.heads_in_vllm --vllm .venv-vllm --target smollm2-135m --head runs/my-head/head \\
        --data data/spec_bench_dev.jsonl --limit 40 --json benchmarks/results/heads-in-vllm.json

The head is exported as `fsd-train export --to vllm` does it. vLLM decodes the prompts greedily with and without it; we
decode them with a chain of as many drafts. `make test-vllm` does this with heads that it trains for a toy target.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.peers import PEERS, install, vllm_variables
from benchmarks.workplace import shown_command
from fsd_bench.environment import environment
from fsd_infer import FuzzyDecoder, Target
from fsd_infer.chat.encoding import encode_chat, read_prompts
from fsd_infer.drafters import EagleDrafter, TreeShape
from fsd_infer.errors import FsdError
from fsd_infer.files import write_json
from fsd_infer.heads.export import export_head
from fsd_infer.heads.head import EagleHead
from fsd_infer.heads.weights import SINGLE
from fsd_infer.targets.loading import parse_dtype
from fsd_train.commands.doctor import runs_of
from fsd_train.commands.export import target_facts

SCRIPT = Path(__file__).parent / "peers" / "run_vllm_head.py"
TIMEOUT = 900  # seconds of one run of vLLM


def run_vllm(python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """What ``run_vllm_head.py`` makes of a job; ``call`` holds the tensors of the head's first call.

    A job whose answers lie in its ``output`` already is not run again. Raises FsdError with vLLM's last words if it
    fails.
    """
    output = Path(job["output"])
    output.mkdir(parents=True, exist_ok=True)
    answers, call, asked = output / "answers.json", output / "call.safetensors", output / "job.json"
    if not (answers.is_file() and asked.is_file() and json.loads(asked.read_text()) == job):
        answers.unlink(missing_ok=True)
        asked.write_text(json.dumps(job))
        _call_vllm(python, asked)
    reply: dict[str, Any] = json.loads(answers.read_text())
    return {**reply, "call": load_file(call) if call.is_file() else {}}


def _call_vllm(python: Path, job: Path) -> None:
    variables = {**os.environ, **vllm_variables(python, torch.get_num_threads())}
    variables.pop("PYTHONPATH", None)
    log = job.parent / "log.txt"
    with open(log, "w") as file:
        command = [str(python), str(SCRIPT), str(job)]
        done = subprocess.run(command, env=variables, stdout=file, stderr=file, timeout=TIMEOUT, check=False)
    if done.returncode:
        raise FsdError(f"vLLM failed: {log.read_text()[-2000:]}")


@torch.no_grad()
def our_logits(head: EagleHead, target: Target, call: dict[str, Tensor]) -> Tensor:
    """[M, V] of our head on what vLLM's was given, -inf outside a reduced vocabulary."""
    ids, positions = call["input_ids"], call["positions"]
    states = call["aux"] if head.eagle3 else call["hidden_states"]
    count = min(len(ids), len(states))
    dtype = next(head.parameters()).dtype
    features = states[:count].to(dtype)
    if head.eagle3:  # the final features, which it does not read, come first
        features = torch.cat([features.new_zeros(count, head.config.target_hidden_size), features], dim=-1)
    embeds = head.embed(ids[:count], target).to(dtype)
    read = head.readout(head(embeds[None], features[None], positions[None, :count])[0])
    rows = target.lm_head_rows(head.draft_ids)[0].to(dtype) if head.lm_head is None else head.lm_head.weight
    logits = (read @ rows.mT).float()
    if head.draft_ids is None:
        return logits
    whole = torch.full((count, target.vocab_size), -torch.inf)
    whole[:, head.draft_ids] = logits
    return whole


def accepted_shares(sources: Sequence[Sequence[int]], drafted: int) -> tuple[list[float], int]:
    """(share of the rounds in which draft 1, 2, … was accepted, rounds), from where the answers' tokens come."""
    runs = [run for row in sources for run in runs_of(row)]
    return [sum(run > place for run in runs) / max(len(runs), 1) for place in range(drafted)], len(runs)


def compare(
    python: Path,
    target: str | Path,
    head: str | Path,
    prompts: Sequence[Sequence[int]],
    scratch: Path,
    *,
    new: int = 64,
    drafted: int = 4,
    dtype: str = "bfloat16",
    plain: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Decode in vLLM and here.

    Args:
        python: of vLLM's environment.
        target: name or directory.
        head: directory of a head of ours.
        prompts: ids.
        scratch: directory for files in between.
        new: tokens of an answer.
        drafted: drafts a round, in a chain.
        dtype: of everything.
        plain: what vLLM gave without a head (the ``plain`` of an earlier result), to save a run.

    Returns:
        ``same_answers``: of ``prompts``, those that vLLM answers as without the head; ``gaps``: for each other one, see
        :func:`gap`; ``vllm`` and ``ours``: shares of rounds whose first, second … draft was accepted, with ``rounds``;
        ``tau_vllm``, ``tau_ours``: tokens a round;
        ``logits``: largest difference (``difference``) beside their standard deviation (``deviation``) and share of
        equal argmaxes; ``plain``
    """
    facts = target_facts(str(target))
    loaded = Target.from_pretrained(str(target), dtype=parse_dtype(dtype))
    own = EagleHead.from_pretrained(head, loaded)
    method = "eagle3" if own.eagle3 else "eagle"
    export_head(own, scratch / "exported", "vllm", facts, dtype=loaded.dtype)
    job = {"target": facts.name, "prompts": [list(ids) for ids in prompts], "new": new, "dtype": dtype}
    plain = plain or run_vllm(python, {**job, "output": str(scratch / "plain")})
    weights = hashlib.sha256((scratch / "exported" / SINGLE).read_bytes()).hexdigest()
    speculation = {"head": str(scratch / "exported"), "weights": weights, "method": method, "drafted": drafted}
    theirs = run_vllm(python, {**job, **speculation, "output": str(scratch / method)})
    if not own.eagle3:
        own.set_draft_ids(None)  # vLLM knows no reduced vocabulary there
    own.cast(loaded.dtype)
    ours = our_logits(own, loaded, theirs["call"])
    logits = theirs["call"]["logits"][: len(ours)].float()
    finite = ours.isfinite() & logits.isfinite()
    assert bool((ours.isfinite() == logits.isfinite()).all()), "the two draft over different tokens"
    drafter = EagleDrafter(own, loaded, TreeShape(drafted, 1, drafted + 1), context_ids=False)
    generation = FuzzyDecoder(loaded, drafter).generate(
        [list(ids) for ids in prompts], max_new_tokens=new, do_sample=False, chat=False
    )
    shares, rounds = accepted_shares([record.sources for record in generation.records], drafted)
    vllm = [count / max(theirs["drafts"], 1) for count in theirs["accepted"]]
    pairs = list(zip(theirs["answers"], plain["answers"], strict=True))
    exact = Target.from_pretrained(str(target), dtype=torch.float32) if any(a != b for a, b in pairs) else loaded
    return {
        "version": theirs["version"],
        "method": method,
        "dtype": dtype,
        "prompts": len(prompts),
        "same_answers": sum(a == b for a, b in pairs),
        "same_tokens": sum(_common(a, b) for a, b in pairs),
        "tokens": sum(len(b) for _, b in pairs),
        "gaps": [gap(exact, ids, a, b) for ids, (a, b) in zip(prompts, pairs, strict=True) if a != b],
        "vllm": {"accepted": vllm, "rounds": theirs["drafts"]},
        "ours": {"accepted": shares, "rounds": rounds},
        "tau_vllm": 1 + sum(vllm),
        "tau_ours": 1 + sum(shares),
        "logits": {
            "positions": len(ours),
            "difference": float((ours - logits)[finite].abs().max()),
            "deviation": float(logits[finite].std()),
            "same_argmax": float((ours.argmax(-1) == logits.argmax(-1)).float().mean()),
        },
        "plain": plain,
    }


@torch.no_grad()
def gap(target: Target, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> dict[str, float]:
    """Where two answers part: how much more the target, in its own dtype, gives the one token than the other.

    Returns:
        ``place`` in the answer, ``gap`` of the two logits, and ``step``: the distance of bfloat16 numbers at the size
        of the larger logit. A gap of a step or two is rounding's to decide: a forward over several drafts adds up in
        another order than one over a single token.
    """
    place = _common(a, b)
    if place == min(len(a), len(b)):
        raise FsdError("one answer is the beginning of the other: they do not end by the same tokens.")
    features = target.features(torch.tensor([[*prompt, *a[:place]]]))
    logits = target.lm_logits(target.features_of(features, [])[0, -1:]).float()[0]
    pair = logits[[a[place], b[place]]]
    step = 2.0 ** (math.floor(math.log2(float(pair.abs().max()))) - 7)
    return {"place": place, "gap": float((pair[0] - pair[1]).abs()), "step": step}


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((place for place, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm"), help="environment with vLLM (%(default)s)")
    parser.add_argument("--install", action="store_true", help="install vLLM there if it is not, and end")
    parser.add_argument("--target", help="built-in name, directory or hub id")
    parser.add_argument("--head", action="extend", nargs="+", default=[], help="directories of heads of ours")
    parser.add_argument("--data", help="prompts")
    parser.add_argument("--limit", type=int, default=40, help="prompts, evenly spaced (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=300, help="longer prompts are left out")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer (%(default)s)")
    parser.add_argument("--drafted", type=int, default=4, help="drafts a round (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of target and head (%(default)s)")
    parser.add_argument("--scratch", type=Path, help="keep vLLM's answers there, and go on from what is there")
    parser.add_argument("--json", type=Path, help="record")
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    try:
        if args.install:
            install(PEERS["vllm"], args.vllm)
            return 0
        record = _record(args)
    except FsdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for head in record["heads"]:
        print(json.dumps({name: head[name] for name in ("method", "same_answers", "tau_vllm", "tau_ours", "logits")}))
    if args.json:
        command = shown_command("benchmarks.heads_in_vllm", words)
        write_json(args.json, {"environment": environment(command), **record}, indent=1)
    return 0


def _record(args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Target.from_pretrained(args.target, dtype=torch.bfloat16).tokenizer
    prompts = [encode_chat(tokenizer, row.messages) for row in read_prompts(args.data)]
    prompts = [ids for ids in prompts if len(ids) <= args.max_prompt_tokens]
    prompts = prompts[:: max(len(prompts) // args.limit, 1)][: args.limit]
    heads: list[dict[str, Any]] = []
    plain = None
    for number, head in enumerate(args.head):
        with tempfile.TemporaryDirectory() as temporary:
            scratch = Path(args.scratch or temporary)
            comparison = compare(
                args.vllm.absolute() / "bin" / "python", args.target, head, prompts, scratch / str(number),
                new=args.max_new_tokens, drafted=args.drafted, dtype=args.dtype, plain=plain,
            )  # fmt: skip
        plain = comparison.pop("plain")
        heads.append({"head": Path(head).name, **comparison})
    settings = {name: getattr(args, name) for name in ("target", "dtype", "max_new_tokens", "drafted")}
    return {**settings, "heads": heads}


if __name__ == "__main__":
    sys.exit(main())
