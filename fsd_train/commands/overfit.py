"""`fsd-train doctor --overfit`: does what training learns arrive in decoding?

A head that is trained on one greedy answer of its target must have nearly all its drafts of that answer accepted, as
decoding repeats it. Where it has not, something between training and decoding differs, and the table names the stage:
template, loss mask, training, export (features, positions, vocabulary map), or decoding.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from fsd_core.errors import CheckpointError, DataError, FsdError
from fsd_core.files import write_text
from fsd_core.text.conversations import row_messages, template_options
from fsd_core.text.encoding import encode_chat
from fsd_core.text.row_check import RowCheck, listing_of
from fsd_core.text.rows import read_rows
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import NoDrafter
from fsd_infer.heads.export import export_head
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.builtin import builtin_dir, is_builtin
from fsd_infer.targets.placing import parse_dtype
from fsd_infer.targets.target import Target
from fsd_train.commands.export import target_facts
from fsd_train.commands.feeding import Finding, at_step
from fsd_train.commands.head_checks import STEPS, Doctor, refuse_images
from fsd_train.commands.new_recipe import recipe_for
from fsd_train.commands.quickstart import read_logged, time_limit
from fsd_train.commands.vllm_head import common_length
from fsd_train.data.row_encoding import encode_row

LEARNT = 0.9  # agreement and acceptance of a head that learnt its answer
MIN_ANSWER = 16  # tokens of an answer that can show it
MAX_STEPS = 400
Row = dict[str, Any]


def overfit(args: argparse.Namespace, target: Target) -> list[Finding]:
    """Train a head on one answer by a recipe, export it, decode with it, and return what each stage kept.

    Args:
        args: doctor's ``target``, ``config``, ``overfit`` (seconds of training), ``max_new_tokens``, and ``data``,
            whose prompts are tried in turn until one has an answer of :data:`MIN_ANSWER` tokens.
        target: in fp32.

    Raises:
        DataError: no prompt has an answer that is long enough.
        FsdError: the training fails.
    """
    prompt, answer, row = _generate_answer(target, prompt_rows(args), args.max_new_tokens)
    with tempfile.TemporaryDirectory(prefix="fsd-overfit-") as name:
        directory = Path(name)
        write_text(directory / "answer.jsonl", json.dumps(row, ensure_ascii=False) + "\n")
        findings = _check_encoding(target, row, prompt, answer)
        if any(finding.ok is False for finding in findings):
            return findings
        agreement = _train(args, directory, len(prompt) + len(answer))
        says = f"{agreement:.0%} of first drafts agree with the answer at the end"
        fix = "give it more seconds (--overfit 300), or a higher learning rate in the recipe"
        findings.append(Finding("training", agreement >= LEARNT, says, fix))
        head = EagleHead.from_pretrained(directory / "head", target, dtype=torch.float32)
        in_vllm = _check_in_vllm(args.target, directory, prompt, answer)
    doctor = Doctor(target, head, [row], len(prompt) + len(answer) + 1)
    dtype = parse_dtype(args.dtype) or torch.bfloat16
    return [*findings, *_check_head(doctor, agreement, len(answer), dtype), *in_vllm]


def _generate_answer(
    target: Target, rows: Sequence[dict[str, Any]], tokens: int
) -> tuple[list[int], list[int], dict[str, Any]]:
    """Return the ids of a prompt as decoding encodes it, of the target's greedy answer, and the row for training."""
    decoder = FuzzyDecoder(target, NoDrafter(target.vocab_size))
    for values in rows:
        if values.get("prompt_ids") is not None and not values.get("messages"):
            messages, prompt = None, list(values["prompt_ids"])
        else:
            messages = row_messages(values)
            while messages[-1]["role"] == "assistant":  # a row of answers: its prompt is wanted
                messages = messages[:-1]
            prompt = encode_chat(target.tokenizer, messages, options=template_options(values))
        answer = decoder.generate([prompt], max_new_tokens=tokens, temperature=0).sequences[0]
        if len(answer) >= MIN_ANSWER:
            return prompt, answer, {**values, "messages": messages, "prompt_ids": prompt, "response_ids": answer}
    raise DataError(
        f"none of {len(rows)} prompts has a greedy answer of {MIN_ANSWER} tokens or more. Give other rows, or raise "
        "--max-new-tokens."
    )


def prompt_rows(args: argparse.Namespace) -> list[Row]:
    """Return the first ``args.rows`` rows of ``args.data`` that have a prompt, with or without an answer."""
    check = RowCheck(args.strict)

    def usable() -> Iterator[Row]:
        for row in read_rows(args.data, check):
            with check.using(row.where, row.values):
                refuse_images(row.values)
                if row.values.get("prompt_ids") is None:
                    row_messages(row.values, row.where)
                yield row.values

    rows = check.first(usable(), args.rows)
    check.finish(listing_of(args.json))
    return rows


def _check_encoding(target: Target, row: dict[str, Any], prompt: list[int], answer: list[int]) -> list[Finding]:
    """Encode the answer as text, as rows without ids are, and compare with what decoding reads and writes."""
    if not row["messages"]:
        return [Finding("template", None, "the row has no messages: its ids are used as they are")]
    text = target.tokenizer.decode(answer, skip_special_tokens=True)
    turns = {**row, "messages": [*row["messages"], {"role": "assistant", "content": text}]}
    for name in ("prompt_ids", "response_ids"):
        turns.pop(name)
    ids, mask = encode_row(turns, target.tokenizer)[-1]
    start = len(prompt)
    if ids[:start] != prompt:
        first = mask.index(1) if 1 in mask else len(ids)
        says = f"training reads {first} tokens before the answer, decoding {start}: not the same"
        fix = "set data.tokenizer to the target's, and the row's template options as in serving"
        return [Finding("template", False, says, fix)]
    template = Finding("template", True, f"training and decoding read the same {start} tokens before the answer")
    return [template, _check_mask(ids[start:], mask[start:], answer, sum(mask[:start]))]


def _check_mask(ids: list[int], mask: list[int], answer: list[int], before: int) -> Finding:
    """Check that training learns the answer's tokens, as far as its text has the same ids again, and no others.

    Args:
        ids, mask: as in training, from the answer's first token.
        answer: ids of decoding.
        before: tokens of the prompt that the mask covers.
    """
    matching = common_length(ids, answer)
    missed = mask[: min(matching, len(answer) - 1)].count(0)
    if missed or before:
        says = f"{missed} of the answer's first {matching} tokens are not learnt, {before} of the prompt's are"
        fix = "let the template's {% generation %} markers enclose the answer and its end token"
        return Finding("loss mask", False, says, fix)
    says = f"{matching} of {len(answer)} answer tokens are the same when the text is encoded again"
    return Finding("loss mask", True if matching >= len(answer) - 1 else None, says)


def _train(args: argparse.Namespace, directory: Path, tokens: int) -> float:
    """Train by the recipe on the one answer, export to ``head``, and return the agreement of the last steps."""
    recipe = directory / "recipe.yaml"
    text = Path(args.config).read_text("utf-8") if args.config else recipe_for(args.target)
    write_text(recipe, text)
    write_text(directory / "overrides.yaml", yaml.safe_dump(_overrides(directory, args.overfit, tokens)))
    command = [sys.executable, "-m", "fsd_train.cli", "fit", "--config", str(recipe)]
    command += ["--config", str(directory / "overrides.yaml")]
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if done.returncode != 0:
        raise FsdError(f"the training of --overfit failed with exit status {done.returncode}. Its output is above.")
    shares = read_logged(directory / "logs", "agreement_0")
    return sum(shares[-5:]) / len(shares[-5:]) if shares else 0.0


def _overrides(directory: Path, seconds: int, tokens: int) -> dict[str, Any]:
    """Return what a recipe needs to learn one answer by heart: no validation, no checkpoints, nothing held out."""
    return {
        "overwrite": True,
        "trainer": {
            "max_steps": MAX_STEPS,
            "max_epochs": -1,
            "max_time": time_limit(seconds),
            "accumulate_grad_batches": 1,
            "limit_val_batches": 0,
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": True,
            "default_root_dir": str(directory),
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": str(directory), "name": "logs"},
            },
            "callbacks": [
                {"class_path": "fsd_train.callbacks.ExportHead", "init_args": {"directory": str(directory / "head")}}
            ],
        },
        "model": {
            "initial_head": None,
            "chain_share": 1.0,
            "lr_scheduler": {"class_path": "fsd_train.models.WarmupCosine", "init_args": {"warmup_steps": 10}},
        },
        "data": {
            "train_files": [str(directory / "answer.jsonl")],
            "validation_files": [],
            "validation_fraction": 0.0,
            "features": None,
            "batch_tokens": tokens,
        },
    }


def _check_head(doctor: Doctor, learnt: float, tokens: int, dtype: torch.dtype) -> list[Finding]:
    """Check the exported head on the same answer, fed as decoding feeds it, then in decoding itself."""
    checks = [*doctor.check_feeding(), doctor.check_dtype(dtype), doctor.check_positions()]
    suspects = [check for check in checks if check.check != "agreement" and (check.ok is False or check.fix)]
    own = doctor.feeding.agreement(at_step(0))
    lost = own < learnt - 0.05
    says = f"the exported head agrees with {own:.0%} of the answer's tokens, in training {learnt:.0%}"
    fix = next((check.fix for check in suspects), "compare the exported config with the recipe")
    findings = [Finding("export", not lost, says, fix), *suspects]
    _, accepted, _ = doctor.decoded(1, tokens)
    share = math.prod(accepted[:STEPS]) ** (1 / len(accepted[:STEPS]))
    says = "accepted by position in decoding: " + " ".join(f"{value:.0%}" for value in accepted)
    fix = "report it: decoding feeds the head in another way than training"
    if lost or suspects or learnt < LEARNT:
        fix = f"first that of {suspects[0].check if suspects else 'export' if lost else 'training'} above"
    return [*findings, Finding("decoding", share >= LEARNT, says, fix)]


def _check_in_vllm(target: str, directory: Path, prompt: list[int], answer: list[int]) -> list[Finding]:
    """Export the head of ``directory`` for vLLM and decode the answer there; nothing without vLLM.

    vLLM is that of the Python in ``VLLM_PYTHON``, or of this one.
    """
    python = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
    if not python:
        return []
    head = EagleHead.from_pretrained(directory / "head")
    try:
        export_head(head, directory / "vllm", "vllm", target_facts(target))
    except CheckpointError as error:
        return [Finding("vllm", None, str(error))]
    job = {
        "target": str(builtin_dir(target) if is_builtin(target) else target), "head": str(directory / "vllm"),
        "method": head.config.layout, "prompt": prompt, "answer": answer, "drafted": STEPS,
        "output": str(directory / "vllm.json"),
    }  # fmt: skip
    write_text(directory / "job.json", json.dumps(job))
    command = [python, str(Path(__file__).with_name("vllm_head.py")), str(directory / "job.json")]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding("vllm", False, str(error), "let VLLM_PYTHON name the Python of vLLM's environment")]
    if done.returncode != 0:
        return [Finding("vllm", False, f"vLLM failed: {done.stderr.strip()[-300:]}", "see what vLLM needs of a head")]
    result = json.loads((directory / "vllm.json").read_text("utf-8"))
    same, accepted, rounds = result["same"], result["accepted"], max(result["drafts"], 1)
    says = f"its first {same} of {len(answer)} tokens are those of decoding here"
    if same < MIN_ANSWER:
        says += ", too few to judge drafts"
        return [Finding("vllm", None, says, "see that vLLM loads the same target, in as fine a dtype")]
    share = (accepted[-1] / rounds) ** (1 / len(accepted))
    says += f"; accepted there by position: {' '.join(f'{count / rounds:.0%}' for count in accepted)}"
    fix = "compare the exported config with vLLM's; fsd-infer decodes it as trained"
    return [Finding("vllm", share >= LEARNT, says, fix)]
