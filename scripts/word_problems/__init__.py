"""Short English word problems with worked answers, made from templates.

Each module holds situations of one kind: functions that fill a :class:`~word_problems.story.Story` with sentences, a
question and one line of work per step. ``SITUATIONS`` lists them with their weights.
"""

from __future__ import annotations

import random

from word_problems import changes, drills, everyday, groups, measures, money, parts, rates, relations
from word_problems.story import Problem, Reject, Situation, Story

__all__ = ["SITUATIONS", "Problem", "make_problem"]

SITUATIONS: list[Situation] = [
    situation
    for module in (changes, relations, groups, money, rates, parts, measures, drills, everyday)
    for situation in module.SITUATIONS
]


def make_problem(rng: random.Random, steps: int, unseen: bool = False, held_out: bool = False) -> Problem:
    """A problem whose answer takes ``steps`` steps, 1 to 5.

    Args:
        rng: where all choices come from.
        steps: lines of work, one operation each.
        unseen: use wordings, names and things that are kept out of training.
        held_out: one of the situations of the held-out problems.
    """
    fitting = [
        situation for situation in SITUATIONS if steps in situation.steps and (situation.held_out or not held_out)
    ]
    weights = [situation.weight for situation in fitting]
    while True:
        situation = rng.choices(fitting, weights)[0]
        story = Story(rng, unseen)
        try:
            situation.tell(story, steps)
            return story.problem(situation.name, steps)
        except Reject:  # numbers that do not come out even, or a wording that training has too
            continue
