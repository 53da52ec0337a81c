"""The sweep itself: every setting answers every prompt at every temperature, and each answer is one line of a file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fsd_bench.base import OF_TEXT, Answer
from fsd_bench.environment import environment
from fsd_bench.evidence.lines import SweepFile
from fsd_bench.evidence.rounds import RoundSizes
from fsd_bench.evidence.settings import Setting, SweepOptions
from fsd_bench.likelihood import mean_log_likelihoods
from fsd_bench.runner import encode_row, measure
from fsd_bench.schedule import WARMUP_TOKENS
from fsd_bench.score import Reference, read_references
from fsd_infer.chat.encoding import PromptRow
from fsd_infer.chat.pieces import token_pieces
from fsd_infer.decoder import FuzzyDecoder, Generation
from fsd_infer.errors import FsdError
from fsd_infer.files import jsonable


def sweep(options: SweepOptions, path: str | Path, *, progress: bool = False, rows: Sequence[PromptRow] = ()) -> Path:
    """Answer, measure, and append to the file at ``path`` what it lacks. A finished file is left as it is.

    Args:
        options: what to run.
        path: of the file, see :class:`.SweepFile`; its first line also has ``prompts`` and ``environment``.
        progress: show a progress bar with the time that is left.
        rows: prompts that were read before, in place of the options'.

    Returns:
        The path.

    Raises:
        FsdError: options that make no sense, another file in the way, and whatever loading or decoding raises; the
            answers so far are kept.
    """
    options.check()
    rows = list(rows) or options.read()
    references = read_references(rows, options.score)
    settings = options.settings()
    asked = "".join(row.id for row in rows)
    described = {**options.to_dict(), "rows_sha256": hashlib.sha256(asked.encode()).hexdigest()[:16]}
    facts = {
        "families": {setting.name: setting.family for setting in settings},
        "rule_facts": {setting.name: setting.rule.describe() for setting in settings},
        "prompts": [_prompt(row, reference) for row, reference in zip(rows, references, strict=True)],
        "environment": environment(),
    }
    file = SweepFile(path, jsonable(described), jsonable(facts))
    done = {_key(line) for line in file.lines}
    todo = [place for place in _places(options, settings, len(rows)) if place.key not in done]
    if todo:
        try:
            _run(options, rows, references, settings, todo, file, progress)
        except FsdError as error:
            error.args = (f"{error} {len(file.lines)} lines are kept in {file.path}: the same command goes on there.",)
            raise
    return file.path


def _prompt(row: PromptRow, reference: Reference | None) -> dict[str, Any]:
    return {
        "id": row.id,
        "where": f"{row.file}:{row.line}",
        "source": str(row.row.get("category") or row.source),
        "text": row.messages[-1]["content"],
        "reference": None if reference is None else str(reference.value),
    }


@dataclass(frozen=True)
class _Place:
    """One line to come."""

    temperature: float
    prompt: int
    repeat: int
    setting: Setting

    @property
    def key(self) -> tuple[float, int, int, str]:
        return self.temperature, self.prompt, self.repeat, self.setting.name


def _key(line: dict[str, Any]) -> tuple[float, int, int, str]:
    return line["temperature"], line["prompt"], line["repeat"], line["setting"]


def _places(options: SweepOptions, settings: Sequence[Setting], prompts: int) -> Iterator[_Place]:
    """All lines in their order. Which setting goes first rotates, so that a busy machine disturbs all alike."""
    for prompt in range(prompts):
        for temperature in options.temperatures:
            for repeat in range(options.repeats if temperature else 1):
                first = (prompt + repeat) % len(settings)
                for setting in (*settings[first:], *settings[:first]):
                    yield _Place(temperature, prompt, repeat, setting)


def _run(
    options: SweepOptions,
    rows: Sequence[PromptRow],
    references: Sequence[Reference | None],
    settings: Sequence[Setting],
    todo: Sequence[_Place],
    file: SweepFile,
    progress: bool,
) -> None:
    decoder = options.load(options.drafter)
    target = decoder.target
    encoded = [encode_row(row, target.name, decoder.tokenizer, target.max_positions, options.raw) for row in rows]
    drafters: dict[Any, RoundSizes] = {options.tree: RoundSizes(decoder.drafter)}
    for setting in settings:
        if setting.tree is not None and setting.tree not in drafters:
            drafters[setting.tree] = RoundSizes(decoder.load_drafter(options.drafter, setting.tree))

    def answer(place: _Place, drafter: RoundSizes, limit: int) -> tuple[Generation, float]:
        drafter.forget()
        start = time.perf_counter()
        generation = decoder.generate(
            [encoded[place.prompt]],
            place.setting.rule,
            drafter=drafter,
            seed=options.seed + 1000 * place.prompt + place.repeat,
            **_decoding(place.temperature, limit),
        )
        return generation, time.perf_counter() - start

    for setting in settings:  # what is compiled or allocated once is not timed
        warm = _Place(todo[0].temperature, todo[0].prompt, 0, setting)
        answer(warm, drafters[setting.tree or options.tree], min(WARMUP_TOKENS, options.max_new_tokens))
    places = tqdm(
        todo, initial=len(file.lines), total=len(file.lines) + len(todo), desc="sweep", unit="answer",
        disable=not progress, smoothing=0.05,
    )  # fmt: skip
    for place in places:
        head = {"temperature": place.temperature, "prompt": place.prompt, "repeat": place.repeat}
        drafter = drafters[place.setting.tree or options.tree]
        generation, seconds = answer(place, drafter, options.max_new_tokens)
        row, reference = rows[place.prompt], references[place.prompt]
        line = _line(decoder, generation, drafter.rounds, encoded[place.prompt], row, reference)
        if place.prompt < options.examples:
            line["pieces"] = token_pieces(decoder.tokenizer, generation.sequences[0])
        file.append(jsonable({**head, "setting": place.setting.name, "seconds": round(seconds, 6), **line}))


def _decoding(temperature: float, limit: int) -> dict[str, Any]:
    if temperature == 0:
        return dict(max_new_tokens=limit, do_sample=False, temperature=None, top_p=None, top_k=None)
    return dict(max_new_tokens=limit, do_sample=True, temperature=temperature, top_p=None, top_k=None)


def _line(
    decoder: FuzzyDecoder,
    generation: Generation,
    rounds: Sequence[int],
    prompt: list[int],
    row: PromptRow,
    reference: Reference | None,
) -> dict[str, Any]:
    """What a line says of one answer."""
    tokens, record, stats = generation.sequences[0], generation.records[0], generation.stats.rows[0]
    answer = Answer(tokens, stats.target_forwards, stats.new_tokens - 1)
    text = measure(answer, decoder.tokenizer, prompt, row, reference)
    return {
        "prefill_seconds": round(stats.prefill_seconds, 6),
        "tokens": tokens,
        "rounds": clip_rounds(rounds, len(tokens)),
        "sources": "".join(str(int(source)) for source in record.sources),
        "spent": [[place, round(nats, 5)] for place, nats in enumerate(record.spent) if nats],
        "target_forwards": stats.target_forwards,
        "gate_open_fraction": stats.gate_open_fraction,
        "gate_accepted_fraction": stats.gate_accepted_fraction,
        "divergence_spent": round(stats.divergence_spent, 5),
        "finish_reason": stats.finish_reason,
        "log_likelihood": mean_log_likelihoods(decoder.target, [(prompt, tokens)])[0] if tokens else None,
        **{name: getattr(answer, name) for name in OF_TEXT},
        "by_proposer": stats.by_proposer,
        "by_kind": stats.by_kind,
        "regrets": stats.drafts.regrets(),
        "final": answer.final,
        "text": text,
    }


def clip_rounds(rounds: Sequence[int], tokens: int) -> list[int]:
    """Tokens of each round that are in the answer: its end may lie within a round, and the last one may be unknown."""
    clipped, left = [], tokens
    for count in rounds:
        if left:
            clipped.append(min(count, left))
            left -= clipped[-1]
    return [*clipped, left] if left else clipped
