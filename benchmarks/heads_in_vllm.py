"""Compare a draft head in vLLM with the same head here: answers, acceptance by position, logits.

    python -m benchmarks.heads_in_vllm --vllm .venv-vllm --target smollm2-135m --head runs/my-head/head \\
        --data data/spec_bench_dev.jsonl --limit 40 --json benchmarks/results/heads-in-vllm.json

The head is exported as `fsd-train export --to vllm` does it. vLLM decodes the prompts greedily with and without it, and
this engine decodes them with a chain of as many drafts. `make test-vllm` does the same with heads trained for a toy.
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
from benchmarks.recorded import parser_of, record_main, spread
from fsd_core.errors import FsdError
from fsd_core.text.encoding import encode_chat, read_prompts
from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import EagleDrafter, TreeShape
from fsd_infer.heads.export import export_head
from fsd_infer.heads.head import EagleHead
from fsd_infer.heads.weights import SINGLE
from fsd_infer.targets.placing import parse_dtype
from fsd_train.commands.export import target_facts
from fsd_train.commands.head_checks import accepted_shares, runs_of
from fsd_train.commands.vllm_head import common_length

SCRIPT = Path(__file__).parent / "peers" / "run_vllm_head.py"
TIMEOUT = 1800  # seconds of one run of vLLM


def run_vllm(python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Return the reply of ``run_vllm_head.py`` to a job; ``call`` holds the tensors of the head's first call.

    A job is not run again if its ``output`` has its answers. Raises FsdError with the end of vLLM's log if it fails.
    """
    output = Path(job["output"])
    output.mkdir(parents=True, exist_ok=True)
    answers, call, job_file = output / "answers.json", output / "call.safetensors", output / "job.json"
    if not (answers.is_file() and job_file.is_file() and json.loads(job_file.read_text()) == job):
        answers.unlink(missing_ok=True)
        job_file.write_text(json.dumps(job))
        _call_vllm(python, job_file)
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
    """Return this engine's logits [M, V] for the inputs of vLLM's head; -inf outside a reduced vocabulary."""
    ids, positions = call["input_ids"], call["positions"]
    states = call["aux"] if head.eagle3 else call["hidden_states"]
    count = min(len(ids), len(states))
    dtype = next(head.parameters()).dtype
    features = states[:count].to(dtype)
    if head.eagle3:  # the final features, which it does not read, come first
        features = torch.cat([features.new_zeros(count, head.config.target_hidden_size), features], dim=-1)
    embeds = head.embed(ids[:count], target).to(dtype)
    hidden = head.readout(head(embeds[None], features[None], positions[None, :count])[0])
    rows = target.lm_head_rows(head.draft_ids)[0].to(dtype) if head.lm_head is None else head.lm_head.weight
    logits = (hidden @ rows.mT).float()
    if head.draft_ids is None:
        return logits
    full = torch.full((count, target.vocab_size), -torch.inf)
    full[:, head.draft_ids] = logits
    return full


def compare(
    python: Path, target: str | Path, head: str | Path, prompts: Sequence[Sequence[int]], scratch: Path, *,
    new: int = 64, drafted: int = 4, dtype: str = "bfloat16", plain: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Decode in vLLM and here.

    Args:
        python: Python of vLLM's environment.
        target: name or directory.
        head: directory of a head.
        prompts: token ids.
        scratch: directory for intermediate files.
        new: new tokens per answer.
        drafted: drafts per round, in a chain.
        dtype: data type of target and head.
        plain: ``plain`` of an earlier result, which saves the run without a head.

    Returns:
        ``same_answers``: number of prompts that vLLM answers the same with and without the head. ``gaps``: see
        :func:`gap`, for every other prompt. ``vllm`` and ``ours``: shares of rounds that accepted the first, second, …
        draft, and ``rounds``. ``tau_vllm`` and ``tau_ours``: tokens per round. ``logits``: the largest ``difference``,
        the logits' standard ``deviation`` and the share of equal argmaxes. ``plain``: vLLM's reply without the head.
    """
    facts = target_facts(str(target))
    loaded = Target.from_pretrained(str(target), dtype=parse_dtype(dtype))
    eagle = EagleHead.from_pretrained(head, loaded)
    method = "eagle3" if eagle.eagle3 else "eagle"
    export_head(eagle, scratch / "exported", "vllm", facts, dtype=loaded.dtype)
    job = {"target": facts.name, "prompts": [list(ids) for ids in prompts], "new": new, "dtype": dtype}
    plain = plain or run_vllm(python, {**job, "output": str(scratch / "plain")})
    weights = hashlib.sha256((scratch / "exported" / SINGLE).read_bytes()).hexdigest()
    speculation = {"head": str(scratch / "exported"), "weights": weights, "method": method, "drafted": drafted}
    theirs = run_vllm(python, {**job, **speculation, "output": str(scratch / method)})
    if not eagle.eagle3:
        eagle.set_draft_ids(None)  # vLLM knows no reduced vocabulary there
    eagle.cast(loaded.dtype)
    vllm = [count / max(theirs["drafts"], 1) for count in theirs["accepted"]]
    logits, (ours, rounds) = _logits(eagle, loaded, theirs["call"]), _accepted(eagle, loaded, prompts, new, drafted)
    pairs = list(zip(theirs["answers"], plain["answers"], strict=True))
    exact = Target.from_pretrained(str(target), dtype=torch.float32) if any(a != b for a, b in pairs) else loaded
    return {
        "version": theirs["version"],
        "method": method,
        "dtype": dtype,
        "prompts": len(prompts),
        "same_answers": sum(a == b for a, b in pairs),
        "same_tokens": sum(common_length(a, b) for a, b in pairs),
        "tokens": sum(len(b) for _, b in pairs),
        "gaps": [gap(exact, ids, a, b) for ids, (a, b) in zip(prompts, pairs, strict=True) if a != b],
        "vllm": {"accepted": vllm, "rounds": theirs["drafts"]},
        "ours": {"accepted": ours, "rounds": rounds},
        "tau_vllm": 1 + sum(vllm),
        "tau_ours": 1 + sum(ours),
        "logits": logits,
        "plain": plain,
    }


def _logits(head: EagleHead, target: Target, call: dict[str, Tensor]) -> dict[str, float]:
    """Compare the logits of vLLM's head with :func:`our_logits`, see :func:`compare`."""
    ours = our_logits(head, target, call)
    theirs = call["logits"][: len(ours)].float()
    finite = ours.isfinite() & theirs.isfinite()
    assert bool((ours.isfinite() == theirs.isfinite()).all()), "the two draft over different tokens"
    return {
        "positions": len(ours),
        "difference": float((ours - theirs)[finite].abs().max()),
        "deviation": float(theirs[finite].std()),
        "same_argmax": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
    }


def _accepted(
    head: EagleHead, target: Target, prompts: Sequence[Sequence[int]], new: int, drafted: int
) -> tuple[list[float], int]:
    """Decode here: shares of rounds that accepted the first, second, … draft, and the number of rounds."""
    drafter = EagleDrafter(head, target, TreeShape(drafted, 1, drafted + 1), context_ids=False)
    generation = FuzzyDecoder(target, drafter).generate(
        [list(ids) for ids in prompts], max_new_tokens=new, do_sample=False, apply_chat_template=False
    )
    rounds = [run for record in generation.records for run in runs_of(record.sources)]
    return accepted_shares(rounds, drafted), len(rounds)


@torch.no_grad()
def gap(target: Target, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> dict[str, float]:
    """Measure how near a tie two answers part, by the target in its own data type.

    Returns:
        ``place``: where the answers part. ``gap``: difference of the two tokens' logits. ``step``: distance of bfloat16
        numbers at the larger logit. Rounding decides a gap of one or two steps, because a forward over several drafts
        sums in another order than a forward over one token.
    """
    place = common_length(a, b)
    if place == min(len(a), len(b)):
        raise FsdError("one answer is the beginning of the other: the two runs stop at different tokens.")
    features = target.features(torch.tensor([[*prompt, *a[:place]]]))
    logits = target.lm_logits(target.features_of(features, [])[0, -1:]).float()[0]
    pair = logits[[a[place], b[place]]]
    step = 2.0 ** (math.floor(math.log2(float(pair.abs().max()))) - 7)
    return {"place": place, "gap": float((pair[0] - pair[1]).abs()), "step": step}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return {"target", "dtype", "max_new_tokens", "drafted", "heads"}. Raises FsdError."""
    tokenizer = Target.from_pretrained(args.target, dtype=torch.bfloat16).tokenizer
    prompts = [encode_chat(tokenizer, row.messages) for row in read_prompts(args.data)]
    prompts = [ids for ids in prompts if len(ids) <= args.max_prompt_tokens]
    prompts = spread(prompts, args.limit)
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
    return {**{name: getattr(args, name) for name in ("target", "dtype", "max_new_tokens", "drafted")}, "heads": heads}


def report(record: dict[str, Any]) -> str:
    """Return a line of JSON per head."""
    names = ("method", "same_answers", "tau_vllm", "tau_ours", "logits")
    return "\n".join(json.dumps({name: head[name] for name in names}) for head in record["heads"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record, or install vLLM. Return 2 after bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = parser_of(
        "benchmarks.heads_in_vllm", __doc__, vllm=(Path(".venv-vllm"), "environment with vLLM"),
        install=(False, "install vLLM there if it is missing, and end"), target=None,
        data=(None, "file of prompts"), limit=(40, "prompts, evenly spaced"),
        max_prompt_tokens=(300, "longest prompt; longer ones are left out"), max_new_tokens=64,
        drafted=(4, "drafts per round"), dtype=("bfloat16", "data type of target and head"),
        scratch=(None, "directory for vLLM's answers, which a later run continues from"), json=None,
    )  # fmt: skip
    parser.add_argument("--head", action="extend", nargs="+", default=[], help="directories of heads")
    args = parser.parse_args(words)
    if not args.install:
        return record_main("benchmarks.heads_in_vllm", parser, measure, report, words)
    try:
        install(PEERS["vllm"], args.vllm)
    except FsdError as error:
        print(f"heads_in_vllm: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
