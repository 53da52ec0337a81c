"""People who have more, fewer or several times as many as others; ages."""

from __future__ import annotations

from word_problems import words
from word_problems.story import Number, Situation, Story


def relation(s: Story, known: str, have: Number, who: str, things: str) -> Number:
    """Tell how many ``who`` has by comparison with ``known``, and work it out."""
    kind = s.rng.choice(("more", "fewer", "times", "part"))
    if kind == "part" and not any(have % n == 0 for n in (2, 3, 4, 5)):
        kind = "more"
    slots = {"a": known, "b": who, "things": things}
    if kind == "more":
        n = s.number()
        s.say(
            "{b} <has|had> {n} more {things} than {a}.",
            "{b} <has|had> {n} {things} more than {a}.",
            "{a} <has|had> {n} fewer {things} than {b}.",
            "{b}'s collection <is|was> larger than {a}'s by {n} {things}.",
            n=n,
            **slots,
        )
        return s.work("{b} has {eq} {things}.", have, "+", n, **slots)
    if kind == "fewer":
        n = s.number(2, max(2, int(have) - 1))
        s.say(
            "{b} <has|had> {n} fewer {things} than {a}.",
            "{b} <has|had> {n} less than {a}.",
            "{a} <has|had> {n} more {things} than {b}.",
            "{b} <is|was> {n} {things} behind {a}.",
            n=n,
            **slots,
        )
        return s.work("{b} has {eq} {things}.", have, "-", n, **slots)
    if kind == "times":
        n = s.rng.choice((2, 2, 3, 3, 4, 5, 6))
        s.say(
            "{b} <has|had> {times} as many {things} as {a}.",
            "{b} <has|had> {times} the number of {things} that {a} <has|had>.",
            "{b} <owns|owned> {times} as many as {a}.",
            "{b}'s {things} <are|were> {times} as many as {a}'s.",
            times=words.TIMES[n],
            **slots,
        )
        return s.work("{b} has {eq} {things}.", have, "*", n, **slots)
    n = s.rng.choice([n for n in (2, 2, 2, 3, 4, 5) if have % n == 0])
    s.say(
        "{b} <has|had> {part} as many {things} as {a}.",
        "{b} <has|had> only {part} of what {a} <has|had>.",
        "{b} <has|had> {part} the number of {things} that {a} <has|had>.",
        "{b}'s {things} <are|were> {part} of {a}'s.",
        part=words.FRACTIONS[n],
        **slots,
    )
    return s.work("{b} has {eq} {things}.", have, "/", n, **slots)


VERBS = (
    "{who} <has|had> {n} {things}.",
    "{who} <collects|collected> {n} {things}.",
    "{who} <sells|sold> {n} {things} [on {day}|].",
    "{who} <finds|found> {n} {things}.",
    "{who} <makes|made> {n} {things}.",
)


def compared(s: Story, steps: int) -> None:
    """A chain of comparisons; asked is the last number, a total or a difference."""
    things = s.pick((*words.COLLECTED, *words.FOOD))
    s.set(day=s.pick(words.DAYS))
    names = [s.person("who").name]
    asked = "last" if steps == 1 else s.rng.choice(("last", "total", "total", "difference"))
    if asked == "total":
        links = (steps + 1) // 2 if steps % 2 == 0 else None
        # with k links the total takes k steps more
        if links is None:
            asked, links = "difference", steps - 1
    elif asked == "difference":
        links = steps - 1
    else:
        links = steps
    if asked == "total":
        links = steps // 2
    have: list[Number] = [s.number()]
    s.say(*VERBS, who=names[0], n=have[0], things=things)
    for _ in range(links):
        name = s.person("other").name
        base = len(names) - 1 if s.chance(0.75) else s.rng.randrange(len(names))
        have.append(relation(s, names[base], have[base], name, things))
        names.append(name)
    if asked == "last":
        s.ask(
            "How many {things} does {b} have?",
            "How many {things} are {b}'s?",
            "How many does {b} have?",
            "What is the number of {b}'s {things}?",
            b=names[-1],
            things=things,
        )
    elif asked == "total":
        s.ask(
            "How many {things} do they have [in all|altogether|in total|together]?",
            "What is the total number of {things}?",
            "How many {things} are there in all?",
            "How many {things} is that in total?",
            "How many {things} do {all} have [together|combined]?",
            things=things,
            all=", ".join(names[:-1]) + f" and {names[-1]}",
        )
        total = have[0]
        for number, one in enumerate(have[1:], start=1):
            last = number == len(have) - 1
            total = s.work(
                "Together they have {eq} {things}." if last else "{pair} have {eq} {things}.",
                total,
                "+",
                one,
                things=things,
                pair=" and ".join(names[: number + 1]),
            )
    else:
        ends = (0, len(have) - 1) if len(have) == 2 or s.chance(0.6) else (len(have) - 2, len(have) - 1)
        big, small = sorted(ends, key=lambda i: -have[i])
        s.ask(
            "How many more {things} does {a} have than {b}?",
            "How many fewer {things} does {b} have than {a}?",
            "What is the difference between {a}'s and {b}'s numbers of {things}?",
            "By how many {things} is {a} ahead of {b}?",
            a=names[big],
            b=names[small],
            things=things,
        )
        s.work("{a} has {eq} more.", have[big], "-", have[small], a=names[big])


def then_changed(s: Story, steps: int) -> None:
    """Two people, one compared with the other; then something is given, eaten or added, and all is counted."""
    things = s.pick((*words.COLLECTED, *words.FOOD))
    a, b = s.person("who").name, s.person("other").name
    have = s.number()
    s.say(*VERBS[:1], who=a, n=have, things=things)
    other = relation(s, a, have, b, things)
    left = steps - 1
    mine: Number = have
    while left > 1:
        n = s.number(2, max(2, int(mine) - 1))
        gain = s.chance(0.5)
        s.say(
            *(
                ("{a} then <buys|bought> {n} more.", "{a} <gets|got> another {n} {things}.")
                if gain
                else ("{a} then <gives|gave> away {n} of {his}.", "{a} <loses|lost> {n} {things}.")
            ),
            a=a,
            n=n,
            things=things,
        )
        mine = s.work("{a} has {eq} {things}.", mine, "+" if gain else "-", n, a=a, things=things)
        left -= 1
    s.ask(
        "How many {things} do they have [together|altogether|in total] [now|]?",
        "How many {things} do {a} and {b} have [in all|combined]?",
        "How many {things} is that for both of them together?",
        "What do {a} and {b} have in total?",
        a=a,
        b=b,
        things=things,
    )
    s.work("Together they have {eq} {things}.", mine, "+", other, things=things)


def ages(s: Story, steps: int) -> None:
    """Ages now, before and later."""
    a = s.person("who").name
    age: Number = s.rng.randint(4, 40)
    s.say(
        "{who} is {n} years old.",
        "{who} is {n}.",
        "{who} turned {n} [this year|last week|].",
        "{who} has just celebrated {his} {n}th birthday." if 10 < age < 20 else "{who} has lived for {n} years.",
        n=age,
    )
    known = a
    for number in range(steps):
        last = number == steps - 1
        if last and s.chance(0.35):
            years = s.rng.randint(2, 15)
            later = s.chance(0.6)
            s.ask(
                "How old will {b} be in {n} years?" if later else "How old was {b} {n} years ago?",
                "What will {b}'s age be {n} years from now?" if later else "What was {b}'s age {n} years ago?",
                b=known,
                n=years,
            )
            s.work(
                "In {n} years, {b} will be {eq}." if later else "{n} years ago, {b} was {eq}.",
                age,
                "+" if later else "-",
                years,
                b=known,
                n=years,
            )
            return
        b = s.person("other").name
        kind = s.rng.choice(("older", "younger", "times", "half"))
        if kind == "times" and age <= 20:
            n = s.rng.choice((2, 2, 3))
            s.say(
                "{b} is {times} as old as {a}.",
                "{b}'s age is {times} that of {a}.",
                "{b} is {times} {a}'s age.",
                "{a}'s {kin} {b} is {times} as old.",
                b=b,
                a=known,
                times=words.TIMES[n],
                kin=s.pick(words.RELATIVES),
            )
            age = s.work("{b} is {eq} years old.", age, "*", n, b=b)
        elif kind == "half" and age % 2 == 0:
            s.say(
                "{b} is half as old as {a}.",
                "{b}'s age is half of {a}'s.",
                "{b} is half {a}'s age.",
                "{a} is twice as old as {b}.",
                b=b,
                a=known,
            )
            age = s.work("{b} is {eq} years old.", age, "/", 2, b=b)
        elif kind == "younger" and age > 5:
            n = s.rng.randint(2, int(age) - 2)
            s.say(
                "{b} is {n} years younger than {a}.",
                "{a} is {n} years older than {b}.",
                "{b} is younger than {a} by {n} years.",
                "{b} was born {n} years after {a}.",
                b=b,
                a=known,
                n=n,
            )
            age = s.work("{b} is {eq} years old.", age, "-", n, b=b)
        else:
            n = s.rng.randint(2, 25)
            s.say(
                "{b} is {n} years older than {a}.",
                "{a} is {n} years younger than {b}.",
                "{b} is older than {a} by {n} years.",
                "{b} was born {n} years before {a}.",
                b=b,
                a=known,
                n=n,
            )
            age = s.work("{b} is {eq} years old.", age, "+", n, b=b)
        known = b
    s.ask("How old is {b}?", "How old is {b} now?", "What is {b}'s age?", "How many years old is {b}?", b=known)


SITUATIONS = [
    Situation(compared, range(1, 6), 3.0),
    Situation(then_changed, range(2, 5), 1.5),
    Situation(ages, range(1, 5), 1.2),
]
