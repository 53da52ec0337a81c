"""Plain arithmetic, without a story."""

from __future__ import annotations

from word_problems.story import Number, Reject, Situation, Story

NAMES = {"+": ("plus", "sum"), "-": ("minus", "difference"), "*": ("times", "product"), "/": ("divided by", "quotient")}


def arithmetic(s: Story, steps: int) -> None:
    """One operation after the other on a number."""
    value: Number = s.number(2, s.rng.choice((20, 99, 999)))
    first = value
    told = []
    for number in range(steps):
        sign = s.rng.choice("+-*/")
        if sign == "+":
            n = s.number(2, s.rng.choice((20, 99, 999)))
        elif sign == "-":
            n = s.number(2, max(2, int(value) - 1))
        elif sign == "*":
            n = s.few(12) if value > 20 else s.number(2, 40)
        else:
            n = s.divisor(value, 25)
        told.append((sign, n))
        value = s.work("{eq}", value, sign, n)
        if value > 5000 or (value < 3 and number < steps - 1):
            raise Reject
    if steps == 1:
        sign, n = told[0]
        s.ask(
            "What is {a} {name} {b}?",
            "Calculate {a} {sign} {b}.",
            "{a} {sign} {b} = ?",
            "Find the {noun} of {a} and {b}.",
            "How much is {a} {name} {b}?",
            "Work out {a} {sign} {b}.",
            a=first,
            b=n,
            sign=sign,
            name=NAMES[sign][0],
            noun=NAMES[sign][1],
        )
        return
    parts = [
        {"+": "add {n}", "-": "subtract {n}", "*": "multiply by {n}", "/": "divide by {n}"}[sign].format(n=s.shown(n))
        for sign, n in told
    ]
    s.ask(
        "Start with {a}, {parts}. What do you get?",
        "Take {a}, {parts}. What is the result?",
        "I think of {a}, {parts}. What comes out?",
        "From {a}, {parts}. Which number is it?",
        a=first,
        parts=", then ".join(parts),
    )


SITUATIONS = [Situation(arithmetic, range(1, 4), 1.6)]
