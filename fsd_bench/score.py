"""Score and measure answers, the same for every method: right (1), wrong (0), or similar to a reference.

========  ==================================================  =====================================================
kind      a row has this reference if its ``answer``          an answer is right if
========  ==================================================  =====================================================
number    is a number, or ends in GSM8K's ``#### N``          the last number in it equals the reference
choice    is one of the options that its prompt ends in       the option that it names first, as a whole word, is
          (``Answer format: true/false``), or of yes/no or    the reference. "answer 2" names answer2. Case counts only
          true/false                                          for options of a single letter
ifeval    is absent, but ``instruction_id_list`` and          all of its instructions are followed, see
          ``kwargs`` say what is asked                        :func:`follows`
========  ==================================================  =====================================================

Layouts of public data sets (:mod:`fsd_bench.layouts`) state how their rows are scored:

========  ============================================================================================================
letter    the answer names the reference's letter last: ``ANSWER: B``, ``\\boxed{B}`` or a letter alone on its line
math      math-verify finds its final answer equal to the reference's
text      what follows its last ``ANSWER:`` is the reference, except for case, blanks and a full stop
code      its code passes the tests, which run only if the caller allows it (:mod:`fsd_bench.code`)
========  ============================================================================================================

``chrf`` and ``rouge`` must be requested (``--score chrf``). The reference is then the row's ``answer`` or
``reference``, a text or a list of texts, and the score is the best over them. It is chrF2 of characters, or ROUGE-L,
the F measure of the longest common subsequence of words (Lin 2004; lower case, letters and digits only, no stemming).
Copies of the prompt raise ROUGE-L.

Numbers may have a sign, decimals and commas between thousands: 18, 18.0 and $18. are equal. An answer that was cut off
before its result is wrong, so allow enough new tokens. Any other reference gives no score.

IFEval (Zhou et al., 2023, arXiv:2311.07911), chrF (Popović, 2015) by sacrebleu and languages by langdetect need the
packages of the extra ``lm-eval``, math-verify the extra ``maths``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import import_module
from typing import Any

from fsd_bench.base import MeasuredAnswer
from fsd_core.errors import DataError, FsdError
from fsd_core.text.encoding import PromptRow
from fsd_infer.engine.ngrams import copied_ngrams, coverage, repeated_ngrams

AUTO = "auto"
NONE = "none"
BY_LAYOUT = ("letter", "math", "text", "code")
KINDS = ("number", "choice", "ifeval", "chrf", "rouge", *BY_LAYOUT)
SCORES = (AUTO, *KINDS, NONE)

# a minus after a digit, a letter or a bracket subtracts
_NUMBER = re.compile(r"(?:(?<![\w.)\]])-)?\d+(?:(?:,\d{3})+(?!\d))?(?:\.\d+)?")
_WORD = re.compile(r"[a-z0-9]+")
_FORMAT = re.compile(r"Answer format:[ \t]*(\S[^\n/]*(?:/[^\n/]+)+)\s*$")
_WITHOUT_FORMAT = (("true", "false"), ("yes", "no"))


@dataclass(frozen=True)
class Reference:
    """What an answer is scored against.

    Attributes:
        kind: one of :data:`KINDS`.
        value: the number, the option, the texts, or IFEval's arguments (JSON).
        options: all options of a choice; for IFEval the prompt and the instructions.
    """

    kind: str
    value: Decimal | str | tuple[str, ...]
    options: tuple[str, ...] = ()

    def score(self, answer: str) -> float:
        """Return 1.0 for a right answer and 0.0 for a wrong one, or chrF or ROUGE-L between 0 and 1."""
        return float(_SCORERS[self.kind](answer, self.value, self.options))


def rouge_l(answer: str, reference: str) -> float:
    """Return the F measure of the longest common subsequence of words, 0 to 1."""
    words, reference_words = (_WORD.findall(text.lower()) for text in (answer, reference))
    # of the longest common subsequence of the words read so far and the first i of the reference
    lengths = [0] * (len(reference_words) + 1)
    for word in words:
        diagonal = 0
        for index, reference_word in enumerate(reference_words, start=1):
            above = lengths[index]
            lengths[index] = diagonal + 1 if word == reference_word else max(above, lengths[index - 1])
            diagonal = above
    return 2 * lengths[-1] / (len(words) + len(reference_words)) if lengths[-1] else 0.0


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def first_option(text: str, options: Sequence[str]) -> str | None:
    """Return the option that a text names first, or None."""
    matches = [(match.start(), option) for option in options if (match := re.search(_pattern(option), text))]
    return min(matches)[1] if matches else None


def _pattern(option: str) -> str:
    words = r"\s*".join(re.escape(part) for part in re.findall(r"\d+|\D+", option))
    return rf"(?<!\w)(?{'' if len(option) == 1 else 'i'}:{words})(?!\w)"


def check_score(kind: str) -> None:
    """Raise FsdError for an unknown kind of score."""
    if kind not in SCORES:
        raise FsdError(f"unknown score {kind!r}. Known: {', '.join(SCORES)}.")


def read_references(rows: Sequence[PromptRow], kind: str = AUTO, run_code: bool = False) -> list[Reference | None]:
    """Return the reference of each row; None if it has none of this kind (``"auto"``: of any kind).

    Raises:
        FsdError: an unknown kind, or answers would be run without ``run_code``.
        DataError: no row has a reference of the requested kind, one has a reference that cannot be used, or a package
            is missing.
    """
    check_score(kind)
    references = [_reference(row, kind) for row in rows]
    if not run_code and any(reference and reference.kind == "code" for reference in references):
        raise FsdError(
            "these answers are programs, and scoring them runs them, with limits but without a sandbox: add --run-code "
            f"on a machine where that may be, or --score {NONE}."
        )
    if kind in KINDS and not any(references):
        raise DataError(f"no row has a reference for --score {kind}: give rows that have one, or --score {NONE}.")
    _check_scorers(rows, references)
    answered = [reference for row, reference in zip(rows, references) if row.row.get("answer") and kind != NONE]
    if unused := answered.count(None):
        print(
            f"notice: {unused} of {len(answered)} answers are not scored: --score {kind} cannot use them.",
            file=sys.stderr,
        )
    return references


def asked_options(row: PromptRow) -> tuple[str, ...]:
    """Return the options that a prompt ends in (``Answer format: true/false``), if it does."""
    match = _FORMAT.search(row.messages[-1]["content"])
    return tuple(option.strip() for option in match[1].split("/")) if match else ()


def _reference(row: PromptRow, kind: str) -> Reference | None:
    answer = row.row.get("answer")
    if kind in ("chrf", "rouge"):
        references = row.row.get("reference") if answer is None else answer
        references = references if isinstance(references, list) else [references]
        texts = tuple(text for text in references if isinstance(text, str))
        return Reference(kind, texts) if any(_WORD.search(text.lower()) for text in texts) else None
    scored_by = row.row.get("scored_by")
    if scored_by is not None and scored_by not in SCORES:
        raise DataError(f"{row.where}: `scored_by` is {scored_by!r:.60}. Known: {', '.join((*BY_LAYOUT, NONE))}.")
    if scored_by in (*BY_LAYOUT, NONE):
        return None if kind not in (AUTO, scored_by) or scored_by == NONE else _layout_reference(row, str(scored_by))
    instructions, arguments = row.row.get("instruction_id_list"), row.row.get("kwargs")
    if kind in (AUTO, "ifeval") and isinstance(instructions, list) and isinstance(arguments, list):
        return Reference("ifeval", json.dumps(arguments), (row.messages[-1]["content"], *map(str, instructions)))
    if kind == NONE or not isinstance(answer, (str, int, float)):
        return None
    text = str(answer).strip()
    if kind in (AUTO, "choice"):
        listed = asked_options(row)
        for options in (listed,) if listed else _WITHOUT_FORMAT:
            chosen = next((option for option in options if option.lower() == text.lower()), None)
            if chosen is not None:
                return Reference("choice", chosen, options)
    if kind in (AUTO, "number"):
        marked = text.rpartition("####")
        number = last_number(marked[2]) if marked[1] or _NUMBER.fullmatch(text) else None
        if number is not None:
            return Reference("number", number)
    return None


def _layout_reference(row: PromptRow, kind: str) -> Reference:
    """Return the reference of a row that says how it is scored. Raises DataError if it cannot be scored so."""
    answer, letters = row.row.get("answer"), row.row.get("letters") or ()
    fits = isinstance(answer, (str, int, float)) and isinstance(letters, (str, list, tuple))
    if fits and kind == "code":
        try:
            fits = {"kind", "tests", "entry", "begun"} <= json.loads(str(answer)).keys()
        except (AttributeError, ValueError):
            fits = False
    if not fits:
        raise DataError(f"{row.where}: its `answer` or `letters` cannot be scored by {kind}. Leave scored_by out.")
    return Reference(kind, str(answer), tuple(letters))


def _check_scorers(rows: Sequence[PromptRow], references: Sequence[Reference | None]) -> None:
    """Score an answer by a reference of each kind, and by all of IFEval's, before there are answers.

    Raises FsdError for a package that is missing, and for instructions that cannot be checked.
    """
    tried = {"code"}  # runs programs
    for row, reference in zip(rows, references, strict=True):
        if reference is None or reference.kind in tried:
            continue
        tried |= {reference.kind} - {"ifeval"}
        try:
            reference.score("x")
            if reference.kind == "chrf":
                other_language("x", reference.value)  # type: ignore[arg-type]
        except FsdError as error:
            raise DataError(f"{row.where}: {error}") from error


# with packages of the extra lm-eval -------------------------------------------------------------------------------


def follows(prompt: str, instructions: Sequence[str], arguments: str, answer: str) -> bool:
    """Return whether the answer follows all of its prompt's instructions: IFEval's strict prompt-level score.

    Args:
        prompt: the row's prompt.
        instructions: its ``instruction_id_list``.
        arguments: its ``kwargs`` as JSON.
        answer: the answer's text.

    Raises:
        FsdError: an unknown instruction or argument, or a missing package or data set of the checkers.
    """
    utils = _module("lm_eval.tasks.ifeval.utils")
    example = utils.InputExample(0, list(instructions), prompt, json.loads(arguments))
    try:
        return bool(utils.test_instruction_following_strict(example, answer).follow_all_instructions)
    except KeyError as error:
        raise FsdError(f"IFEval knows no instruction {error}: check the row's instruction_id_list.") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise FsdError(f"IFEval cannot check this row ({error!r:.120}): check its kwargs.") from error
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
def _module(name: str, extra: str = "lm-eval") -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise FsdError(
            f"this score needs a package that is not installed ({error}): pip install 'fsd-toolkit[{extra}]'."
        ) from error


_LETTER = re.compile(
    r"(?i:answer(?: is)?)[\s:*$]*(?:[(\[]([A-Za-z])[)\]]|[(\[]?([A-Z])\b)"  # a small letter only in brackets
    r"|\\boxed\{\(?([A-Z])\)?\}|^\W*([A-Za-z])\W*$",
    re.M,
)


def last_letter(answer: str) -> str | None:
    """Return the letter that an answer names last, or None."""
    letters = [next(filter(None, groups)).upper() for groups in _LETTER.findall(answer)]
    return letters[-1] if letters else None


def _is_text(answer: str, text: str) -> bool:
    final = re.split(r"ANSWER:", answer, flags=re.IGNORECASE)[-1]
    given, expected = (" ".join(part.split()).strip(" .*").casefold() for part in (final, text))
    return given == expected


def _is_equal(answer: str, text: str) -> bool:
    library = _module("math_verify", "maths")
    expected = library.parse(text if "\\" not in text and "$" not in text else f"${text.strip('$')}$")
    return bool(library.verify(expected, library.parse(answer)))


def _passes(answer: str, program: str) -> bool:
    from fsd_bench.code import solves  # POSIX only

    return solves(answer, json.loads(program))


_SCORERS: dict[str, Callable[[str, Any, Sequence[str]], float]] = {  # of the answer, a reference's value and options
    "number": lambda answer, number, _: last_number(answer) == number,
    "choice": lambda answer, option, options: first_option(answer, options) == option,
    "ifeval": lambda answer, arguments, asked: follows(asked[0], asked[1:], arguments, answer),
    "chrf": lambda answer, texts, _: chrf(answer, texts),
    "rouge": lambda answer, texts, _: max(rouge_l(answer, text) for text in texts),
    "letter": lambda answer, letter, _: last_letter(answer) == letter.upper(),
    "text": lambda answer, text, _: _is_text(answer, text),
    "math": lambda answer, text, _: _is_equal(answer, text),
    "code": lambda answer, program, _: _passes(answer, program),
}


# all measures of an answer -----------------------------------------------------------------------------------------


def measure(
    answer: MeasuredAnswer, tokenizer: Any, prompt: Sequence[int], row: PromptRow, reference: Reference | None
) -> None:
    """Measure an answer's text, and store it and the results in the answer. Skips answers without text and tokens.

    Args:
        answer: receives the results.
        tokenizer: the target's tokenizer.
        prompt: token ids.
        row: the prompt's row.
        reference: what the answer is scored against, or None.
    """
    text, tokens = answer.text, answer.tokens
    if tokens is not None:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
    elif text is not None:
        tokens = tokenizer.encode(text, add_special_tokens=False)
    if text is None or tokens is None:
        return
    answer.text = text
    answer.copied_4grams, answer.repeated_4grams = copied_ngrams(prompt, tokens), repeated_ngrams(tokens)
    if reference is not None and reference.kind in BY_LAYOUT:
        answer.final = last_letter(text) if reference.kind == "letter" else None
    else:
        answer.final = final_answer(text, (reference and reference.options) or asked_options(row))
    if reference is not None:
        answer.score = reference.score(text)
        if reference.kind == "rouge":
            answer.coverage = word_coverage(row.messages[-1]["content"], text)
        elif reference.kind == "chrf":
            answer.other_language = float(other_language(text, reference.value))  # type: ignore[arg-type]


def word_coverage(source: str, summary: str) -> float | None:
    """Return :func:`fsd_infer.engine.ngrams.coverage` of words in lower case."""
    words, summary_words = (re.findall(r"\w+", text.lower()) for text in (source, summary))
    return coverage(words, summary_words)


def final_answer(text: str, options: Sequence[str] = ()) -> str | None:
    """Return the final answer of a text: the option that it names first, or without options its last number.

    Equal numbers give equal texts (18.0 and 18). None without an option or a number.
    """
    if options:
        return first_option(text, options)
    number = last_number(text)
    if number is None:
        return None
    digits = f"{number:f}"
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) or "0"
