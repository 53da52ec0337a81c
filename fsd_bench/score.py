"""Score answers by a small matcher, the same for every method: right (1), wrong (0), or similar to a reference.

========  ==================================================  =====================================================
kind      a row has this reference if its ``answer``          an answer is right if
========  ==================================================  =====================================================
number    is a number, or ends in GSM8K's ``#### N``          the last number in it equals the reference
choice    is one of the options that its prompt ends in       the option that it names first, as a whole word, is
          (``Answer format: true/false``), or of yes/no or    the reference. "answer 2" names answer2. Case counts only
          true/false                                          for options of a single letter
ifeval    is absent, but ``instruction_id_list`` and          all of its instructions are followed, see
          ``kwargs`` say what is asked                        :func:`fsd_bench.texts.follows`
========  ==================================================  =====================================================

``chrf`` and ``rouge`` must be requested (``--score chrf``). The reference is then the row's ``answer`` or
``reference``, a text or a list of texts, and the score is the best over them. It is chrF2 of characters, or ROUGE-L,
the F measure of the longest common subsequence of words (Lin 2004; lower case, letters and digits only, no stemming).
Copies of the prompt raise ROUGE-L.

Numbers may have a sign, decimals and commas between thousands: 18, 18.0 and $18. are equal. An answer that was cut off
before its result is wrong, so allow enough new tokens. Any other reference gives no score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from fsd_bench.texts import chrf, follows
from fsd_infer.chat.encoding import PromptRow
from fsd_infer.errors import DataError, FsdError

AUTO = "auto"
NONE = "none"
KINDS = ("number", "choice", "ifeval", "chrf", "rouge")
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
        if self.kind == "ifeval":
            return float(follows(self.options[0], self.options[1:], str(self.value), answer))
        if self.kind == "chrf":
            return chrf(answer, self.value)  # type: ignore[arg-type]
        if self.kind == "rouge":
            return max(rouge_l(answer, text) for text in self.value)  # type: ignore[union-attr]
        said = first_option(answer, self.options) if self.kind == "choice" else last_number(answer)
        return float(said == self.value)


def rouge_l(answer: str, reference: str) -> float:
    """Return the F measure of the longest common subsequence of words, 0 to 1."""
    own, other = (_WORD.findall(text.lower()) for text in (answer, reference))
    lengths = [0] * (len(other) + 1)  # of the longest common subsequence of the words read so far and other[:i]
    for word in own:
        before = 0
        for place, wanted in enumerate(other, start=1):
            above = lengths[place]
            lengths[place] = before + 1 if word == wanted else max(above, lengths[place - 1])
            before = above
    return 2 * lengths[-1] / (len(own) + len(other)) if lengths[-1] else 0.0


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def first_option(text: str, options: Sequence[str]) -> str | None:
    """Return the option that a text names first, or None."""
    places = [(match.start(), option) for option in options if (match := re.search(_pattern(option), text))]
    return min(places)[1] if places else None


def _pattern(option: str) -> str:
    words = r"\s*".join(re.escape(part) for part in re.findall(r"\d+|\D+", option))
    return rf"(?<!\w)(?{'' if len(option) == 1 else 'i'}:{words})(?!\w)"


def check_score(kind: str) -> None:
    """Raise FsdError for an unknown kind of score."""
    if kind not in SCORES:
        raise FsdError(f"unknown score {kind!r}. Known: {', '.join(SCORES)}.")


def read_references(rows: Sequence[PromptRow], kind: str = AUTO) -> list[Reference | None]:
    """Return the reference of each row; None if it has none of this kind (``"auto"``: of any kind).

    Raises:
        FsdError: an unknown kind.
        DataError: no row has a reference of the requested kind.
    """
    check_score(kind)
    references = [_reference(row, kind) for row in rows]
    if kind in KINDS and not any(references):
        raise DataError(f"no row has a reference for --score {kind}: give rows that have one, or --score {NONE}.")
    return references


def asked_options(row: PromptRow) -> tuple[str, ...]:
    """Return the options that a prompt ends in (``Answer format: true/false``), if it does."""
    asked = _FORMAT.search(row.messages[-1]["content"])
    return tuple(option.strip() for option in asked[1].split("/")) if asked else ()


def _reference(row: PromptRow, kind: str) -> Reference | None:
    answer = row.row.get("answer")
    if kind in ("chrf", "rouge"):
        given = row.row.get("reference") if answer is None else answer
        texts = tuple(text for text in (given if isinstance(given, list) else [given]) if isinstance(text, str))
        return Reference(kind, texts) if any(_WORD.search(text.lower()) for text in texts) else None
    asked, arguments = row.row.get("instruction_id_list"), row.row.get("kwargs")
    if kind in (AUTO, "ifeval") and isinstance(asked, list) and isinstance(arguments, list):
        return Reference("ifeval", json.dumps(arguments), (row.messages[-1]["content"], *map(str, asked)))
    if kind == NONE or not isinstance(answer, (str, int, float)):
        return None
    text = str(answer).strip()
    if kind in (AUTO, "choice"):
        given = asked_options(row)
        for options in (given,) if given else _WITHOUT_FORMAT:
            chosen = next((option for option in options if option.lower() == text.lower()), None)
            if chosen is not None:
                return Reference("choice", chosen, options)
    if kind in (AUTO, "number"):
        marked = text.rpartition("####")
        number = last_number(marked[2]) if marked[1] or _NUMBER.fullmatch(text) else None
        if number is not None:
            return Reference("number", number)
    return None
