"""Score open-ended answers with the packages of the extra ``lm-eval``.

IFEval (Zhou et al., 2023, arXiv:2311.07911): whether an answer follows verifiable instructions, by the checkers of
lm-evaluation-harness. chrF (Popović, 2015) of translations by sacrebleu, and their language by langdetect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from fsd_infer.errors import FsdError


def follows(prompt: str, instructions: Sequence[str], arguments: str, answer: str) -> bool:
    """Return whether the answer follows all of its prompt's instructions: IFEval's strict prompt-level score.

    Args:
        prompt: the row's prompt.
        instructions: its ``instruction_id_list``.
        arguments: its ``kwargs`` as JSON.
        answer: the answer's text.

    Raises:
        FsdError: an unknown instruction, or a missing package or data set of the checkers.
    """
    utils = _module("lm_eval.tasks.ifeval.utils")
    example = utils.InputExample(0, list(instructions), prompt, json.loads(arguments))
    try:
        return bool(utils.test_instruction_following_strict(example, answer).follow_all_instructions)
    except KeyError as error:
        raise FsdError(f"IFEval knows no instruction {error}: check the row's instruction_id_list.") from error
    except LookupError as error:
        raise FsdError(
            "IFEval counts words with NLTK's punkt_tab, which is missing: python -m nltk.downloader punkt_tab."
        ) from error


def chrf(answer: str, references: Sequence[str]) -> float:
    """Return chrF2 of an answer, 0 to 1, the best over references."""
    sentence_chrf = _module("sacrebleu").sentence_chrf
    return max(float(sentence_chrf(answer, [reference]).score) for reference in references) / 100


def other_language(answer: str, references: Sequence[str]) -> bool:
    """Return whether the answer's language differs from its first reference's."""
    detect = _detector()
    return detect(answer) != detect(references[0])


@cache
def _detector() -> Callable[[str], str | None]:
    langdetect = _module("langdetect")
    langdetect.DetectorFactory.seed = 0  # it samples

    def detected(text: str) -> str | None:
        try:
            return str(langdetect.detect(text))
        except langdetect.LangDetectException:  # no letters
            return None

    return detected


@cache
def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise FsdError(
            f"this score needs a package that is not installed ({error}): pip install 'fsd-toolkit[lm-eval]'."
        ) from error
