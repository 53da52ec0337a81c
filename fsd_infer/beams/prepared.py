"""A prepared ``generate`` call with ``num_beams`` > 1, decoded."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import GenerationConfig

from fsd_infer.beams.engine import BeamRequest, search_beams
from fsd_infer.beams.options import BeamOptions
from fsd_infer.drafters.base import Drafter
from fsd_infer.engine import Outcome, Request
from fsd_infer.errors import FsdError
from fsd_infer.rules import Exact, Rule
from fsd_infer.targets.target import Target

NO_ANSWER = -1e9  # the score of an answer that a search could not find, as in transformers


def decode_beams(
    target: Target,
    drafter: Drafter,
    rules: Sequence[Rule],
    request: Request,
    config: GenerationConfig,
    options: BeamOptions | None = None,
) -> Outcome:
    """The best ``num_return_sequences`` answers of each prompt with their scores; see :func:`search_beams`.

    Where a search finds fewer answers, because its processors allow no more, the others are empty.

    Raises:
        FsdError: a rule other than `exact`, a streamer, a likelihood that the search does not know.
    """
    if lossy := [rule for rule in rules if not isinstance(rule, Exact)]:
        raise FsdError(
            f"rule {lossy[0].describe()['rule']!r} has no meaning with num_beams > 1: a rule decides which tokens of "
            "one text are accepted, beams compete with each other. Use rule exact, or num_beams=1."
        )
    if request.on_tokens is not None:
        raise FsdError("a streamer shows one growing answer, and beams change places: leave it out, or num_beams=1.")
    if request.measure_log_likelihood and request.processors:
        raise FsdError(
            "with num_beams > 1 and logits processors the answers' scores are no log-likelihoods: leave "
            "measure_log_likelihood out."
        )
    beams = config.num_beams or 1
    asked = BeamRequest(
        request,
        beams,
        length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
        early_stopping=False if config.early_stopping is None else config.early_stopping,
        options=options or BeamOptions(),
    )
    found = search_beams(target, drafter, asked)
    if request.measure_log_likelihood:
        for record, row, answers in zip(found.records, found.stats.rows, found.answers, strict=True):
            length = len(record.tokens)
            row.mean_log_likelihood = answers[0].score * length ** (asked.length_penalty - 1.0) if answers else None
    wanted = config.num_return_sequences or 1
    sequences, scores = [], []
    for answers in found.answers:
        for place in range(wanted):
            sequences.append(answers[place].tokens if place < len(answers) else [])
            scores.append(answers[place].score if place < len(answers) else NO_ANSWER)
    return Outcome(sequences, found.records, found.stats, scores)
