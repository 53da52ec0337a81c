"""Lengths, areas, weights, times and their units."""

from __future__ import annotations

from word_problems import words
from word_problems.story import Number, Situation, Story

UNITS = (
    ("minutes", "hours", 60),
    ("seconds", "minutes", 60),
    ("hours", "days", 24),
    ("days", "weeks", 7),
    ("months", "years", 12),
    ("inches", "feet", 12),
    ("feet", "yards", 3),
    ("centimeters", "meters", 100),
    ("grams", "kilograms", 1000),
    ("ounces", "pounds", 16),
    ("eggs", "dozen eggs", 12),
    ("cents", "dollars", 100),
    ("pints", "quarts", 2),
    ("quarts", "gallons", 4),
)


def conversion(s: Story, steps: int) -> None:
    """An amount in one unit, asked for in another, after a sum or a product."""
    s.person()
    small, big, factor = s.rng.choice(UNITS)
    n = s.rng.randint(2, 9 if factor > 50 else 15)
    per = "dozen" if big == "dozen eggs" else big[:-1] if big != "feet" else "foot"
    slots = {"small": small, "big": big, "factor": factor, "per": per}
    down = s.chance(0.7)
    what = s.rng.choice(("A plan", "A task", "An order", "The work", "A job", "The whole thing", "A package"))
    if steps == 1:
        if down:
            s.ask(
                "{what} comes to {n} {big}. How many {small} is that?",
                "How many {small} are {n} {big}?",
                "How many {small} are [there in|in] {n} {big}?",
                "What is {n} {big} in {small}?",
                n=n,
                what=what,
                **slots,
            )
            s.work("{n} {big} are {eq} {small}.", n, "*", factor, n=n, **slots)
        else:
            s.ask(
                "{what} comes to {n} {small}. How many {big} is that?",
                "How many {big} are {n} {small}?",
                "How many {big} do {n} {small} make?",
                "What is {n} {small} in {big}?",
                n=n * factor,
                what=what,
                **slots,
            )
            s.work("{n} {small} are {eq} {big}.", n * factor, "/", factor, n=n * factor, **slots)
        return
    total: Number = s.work("{n} {big} are {eq} {small}.", n, "*", factor, n=n, **slots)
    s.say(
        "{what} <takes|took> {n} {big}.",
        "{what} <comes|came> to {n} {big}.",
        "{who} <has|had> {n} {big} for it.",
        "{n} {big} <are|were> set aside for it.",
        n=n,
        what=what,
        **slots,
    )
    left = steps - 1
    while left > 1:
        m = s.number(2, max(2, int(total) // 2))
        gain = s.chance(0.5)
        s.say(
            *(
                ("Then {m} {small} <are|were> added.", "{m} {small} more <come|came> to it.")
                if gain
                else ("{m} {small} of it <are|were> [lost|used|left out].", "It <is|was> cut by {m} {small}.")
            ),
            m=m,
            **slots,
        )
        total = s.work(
            "That makes {eq} {small}." if gain else "That leaves {eq} {small}.", total, "+" if gain else "-", m, **slots
        )
        left -= 1
    if s.chance(0.5):
        k = s.divisor(total, 20)
        s.ask(
            "It is split into {k} equal parts. How many {small} is each part?",
            "How many {small} is each of {k} equal parts?",
            "Divided equally among {k} [people|days|groups], how many {small} is that for each?",
            "In {k} equal parts, how many {small} is one of them?",
            k=k,
            **slots,
        )
        s.work("Each part is {eq} {small}.", total, "/", k, **slots)
        return
    m = s.number(2, max(2, int(total) - 1))
    s.ask(
        "After {m} {small}, how many {small} are left?",
        "How many {small} are left when {m} {small} are used?",
        "{m} {small} are gone. How many {small} remain?",
        "How many {small} remain after {m} {small}?",
        m=m,
        **slots,
    )
    s.work("{eq} {small} are left.", total, "-", m, **slots)


def cutting(s: Story, steps: int) -> None:
    """Ropes, ribbons and boards, cut in pieces."""
    s.person()
    thing = s.rng.choice(("rope", "ribbon", "board", "wire", "string", "pipe", "roll of cloth", "chain", "plank"))
    unit = s.rng.choice(("meters", "feet", "centimeters", "inches", "yards"))
    size, count = s.rng.randint(2, 15), s.few(20)
    waste = s.number(2, 20)
    slots = {"thing": thing, "unit": unit, "size": size, "waste": waste}
    left = steps
    whole: Number = size * count
    if left >= 3:
        a = s.rng.randint(2, 8)
        if (size * count + waste) % a:
            a = 1
        if a == 1:
            part = s.number(1, size * count + waste - 1)
            s.say(
                "{who} <joins|joined> two {thing}s of {a} and {b} {unit}.",
                "{who} <has|had> a {thing} of {a} {unit} and another of {b} {unit}.",
                "A {thing} of {a} {unit} and one of {b} {unit} <lie|lay> there.",
                "{who} <ties|tied> {a} {unit} of {thing} to {b} {unit}.",
                **slots,
                a=part,
                b=size * count + waste - part,
            )
            whole = s.work("Together, they are {eq} {unit} long.", part, "+", size * count + waste - part, **slots)
        else:
            s.say(
                "{who} <has|had> {a} {thing}s of {b} {unit} each.",
                "{a} {thing}s <are|were> {b} {unit} long each.",
                "Each of {a} {thing}s <is|was> {b} {unit} long.",
                "{who} <buys|bought> {a} {thing}s, {b} {unit} each.",
                **slots,
                a=a,
                b=(size * count + waste) // a,
            )
            whole = s.work("In all, that is {eq} {unit}.", a, "*", (size * count + waste) // a, **slots)
        left -= 1
    elif left == 2:
        whole = size * count + waste
        s.say(
            "{who} <has|had> a {thing} of {n} {unit}.",
            "A {thing} <is|was> {n} {unit} long.",
            "{who} <buys|bought> {n} {unit} of {thing}.",
            "{n} {unit} <is|was> the length of a {thing}.",
            n=whole,
            **slots,
        )
    else:
        s.say(
            "{who} <has|had> a {thing} of {n} {unit}.",
            "A {thing} <is|was> {n} {unit} long.",
            "{who} <buys|bought> {n} {unit} of {thing}.",
            "{n} {unit} <is|was> the length of a {thing}.",
            n=whole,
            **slots,
        )
    if left >= 2:
        s.say(
            "{waste} {unit} of it <are|were> [used|damaged|cut off].",
            "{He} <uses|used> {waste} {unit} of it.",
            "{who} <gives|gave> {waste} {unit} of it away.",
            "{waste} {unit} of it <cannot|could not> be used.",
            He=s.slots["he"].capitalize(),
            **slots,
        )
        whole = s.work("{eq} {unit} are left.", whole, "-", waste, **slots)
        left -= 1
    if left != 1:
        left -= 1
    s.ask(
        "How many pieces of {size} {unit} can be cut from it?",
        "It <is|was> cut in pieces of {size} {unit}. How many pieces are there?",
        "If each piece is {size} {unit} long, how many pieces are there?",
        "How many pieces does that make, {size} {unit} each?",
        **slots,
    )
    pieces = s.work("That makes {eq} pieces.", whole, "/", size)
    if steps == 4:
        p = s.number(2, 12)
        s.sentences.append(s.fill("It <is|was> cut in pieces of {size} {unit}.", slots, s.shown))
        s.ask(
            "If a piece is sold for {p}, how much do all pieces bring?",
            "At {p} a piece, how much money is that?",
            p=s.dollars(p),
        )
        s.work("They bring {eq} dollars.", pieces, "*", p)


def rectangle(s: Story, steps: int) -> None:
    """Perimeters and areas of rooms, gardens and fields, and what covering or fencing them costs."""
    s.person()
    a, b = s.number(3, 40), s.number(3, 30)
    what = s.pick(("garden", "room", "field", "yard", "playground", "floor", "poster", "carpet", "wall", "pool"))
    unit = s.rng.choice(("meters", "feet"))
    slots = {"what": what, "unit": unit, "a": a, "b": b}
    s.say(
        "A {what} <is|was> {a} {unit} long and {b} {unit} wide.",
        "{who}'s {what} <is|was> {a} {unit} by {b} {unit}.",
        "{who} <has|had> a rectangular {what}, {a} {unit} long and {b} {unit} wide.",
        "The sides of a {what} <are|were> {a} and {b} {unit}.",
        **slots,
    )
    if steps == 1 or s.chance(0.5):
        area = s.work("The area is {eq} square {unit}.", a, "*", b, **slots)
        if steps == 1:
            s.ask(
                "What is its area, in square {unit}?",
                "How many square {unit} is that?",
                "How large is it, in square {unit}?",
                "What area does it cover, in square {unit}?",
                **slots,
            )
            return
        left = steps - 1
        if left >= 2:
            n = s.number(2, max(2, int(area) // 2))
            s.say(
                "{n} square {unit} of it <are|were> [covered|left out|taken].",
                "A part of {n} square {unit} <is|was> left out.",
                n=n,
                **slots,
            )
            area = s.work("{eq} square {unit} are left.", area, "-", n, **slots)
            left -= 1
        p = s.rng.randint(2, 12)
        s.ask(
            "How much does it cost to cover {it} at {p} per square {one}?",
            "Tiles cost {p} per square {one}. How much do the tiles for {it} cost?",
            it="the rest" if len(s.lines) > 1 else "it",
            p=s.dollars(p),
            one="foot" if unit == "feet" else "meter",
        )
        area = s.work("That costs {eq} dollars.", area, "*", p)
        left -= 1
        if left == 1:
            n = int(area) + s.number(2, 90)
            s.question = ""
            s.say(
                "Covering the rest <costs|cost> {p} per square {one}.",
                p=s.dollars(p),
                one="foot" if unit == "feet" else "meter",
            )
            s.ask("How much is left of {n}?", "{who} <has|had> {n}. How much is left after that?", n=s.dollars(n))
            s.work("{eq} dollars are left.", n, "-", area)
        return
    half = s.work("One long and one short side are {eq} {unit}.", a, "+", b, **slots)
    around = s.work("All four sides are {eq} {unit}.", half, "*", 2, **slots)
    if steps == 2:
        s.ask(
            "What is its perimeter, in {unit}?",
            "How many {unit} of fence go around it?",
            "How long is a walk around it, in {unit}?",
            "How far is it around, in {unit}?",
            **slots,
        )
        return
    left = steps - 2
    if left >= 2:
        gate = s.rng.randint(2, 6)
        s.say(
            "A gate of {n} {unit} <needs|needed> no fence.",
            "There <is|was> a gate of {n} {unit} without fence.",
            n=gate,
            **slots,
        )
        around = s.work("The fence is {eq} {unit} long.", around, "-", gate, **slots)
        left -= 1
    p = s.rng.randint(2, 15)
    one = "foot" if unit == "feet" else "meter"
    if left == 2:
        s.say("A fence <costs|cost> {p} per {one}.", "Every {one} of fence <costs|cost> {p}.", p=s.dollars(p), one=one)
        cost = s.work("The fence costs {eq} dollars.", around, "*", p)
        extra = s.number(5, 90)
        s.ask(
            "With {n} for the work, what is the total cost?",
            "The work costs {n} more. How much is that in all?",
            n=s.dollars(extra),
        )
        s.work("In all, that is {eq} dollars.", cost, "+", extra)
        return
    s.ask(
        "How much does a fence around it cost at {p} per {one}?",
        "If a fence costs {p} per {one}, how much does it cost to fence it?",
        "What is the price of the fence at {p} per {one}?",
        "What does fencing it cost at {p} per {one}?",
        p=s.dollars(p),
        one=one,
    )
    s.work("The fence costs {eq} dollars.", around, "*", p)


def durations(s: Story, steps: int) -> None:
    """Minutes spent on several things, every day or once."""
    s.person()
    acts = s.some(
        (
            "practicing the piano",
            "doing homework",
            "reading",
            "cleaning",
            "jogging",
            "cooking",
            "drawing",
            "watching television",
            "playing outside",
            "walking the dog",
            "swimming",
            "gardening",
            "studying",
            "sewing",
        ),
        3,
    )
    times = [s.rng.randint(1, 12) * 5 if s.chance(0.7) else s.rng.randint(2, 60) for _ in range(3)]
    left = steps
    if left == 1 or s.chance(0.4):
        days = s.few(10)
        s.say(
            "{who} <spends|spent> {n} minutes a day {act} for {days} days.",
            "For {days} days, {who} <spends|spent> {n} minutes a day {act}.",
            "Every day for {days} days, {who} <spends|spent> {n} minutes {act}.",
            "{who} <is|was> {act} {n} minutes a day, {days} days long.",
            n=times[0],
            act=acts[0],
            days=days,
        )
        total: Number = s.work("That is {eq} minutes.", times[0], "*", days)
        left -= 1
    else:
        s.say(
            "{who} <spends|spent> {n} minutes {act}.",
            "{who} <spends|spent> {n} minutes {act} on {day}.",
            "First, {who} <spends|spent> {n} minutes {act}.",
            "{n} minutes of {who}'s day <go|went> into {act}.",
            n=times[0],
            act=acts[0],
            day=s.pick(words.DAYS),
        )
        total = times[0]
    for n, act in zip(times[1:], acts[1:]):
        if not left or (left == 1 and s.chance(0.3)):
            break
        s.say(
            "Then {he} <spends|spent> {n} minutes {act}.",
            "{He} also <spends|spent> {n} minutes {act}.",
            "After that, {he} <is|was> {act} for {n} minutes.",
            "{n} more minutes <go|went> into {act}.",
            n=n,
            act=act,
            He=s.slots["he"].capitalize(),
        )
        total = s.work("In all, that is {eq} minutes.", total, "+", n)
        left -= 1
    if left == 0:
        s.ask(
            "How many minutes is that [in all|altogether|in total]?",
            "How many minutes does {who} spend on [this|it] [in all|]?",
            "What is the total time, in minutes?",
            "How long is that altogether, in minutes?",
        )
        return
    if left == 1 and total % 60 == 0 and total > 60:
        s.ask(
            "How many hours is that [in all|]?",
            "How many hours does that make?",
            "What is the total time, in hours?",
            "In hours, how long is that?",
        )
        s.work("That is {eq} hours.", total, "/", 60)
        return
    limit = int(total) + s.number(5, 90)
    if left == 2:
        more = s.number(2, max(2, limit - int(total) - 1))
        s.say("A break <takes|took> another {n} minutes.", "{n} minutes <are|were> lost on the way.", n=more)
        total = s.work("With that, it is {eq} minutes.", total, "+", more)
    s.ask(
        "Of {n} free minutes, how many are left?",
        "{He} <has|had> {n} minutes [in all|]. How many minutes are left?",
        "How many minutes of {his} {n} are left?",
        "How much of {n} minutes remains?",
        n=limit,
        He=s.slots["he"].capitalize(),
    )
    s.work("{eq} minutes are left.", limit, "-", total)


def weights(s: Story, steps: int) -> None:
    """What things weigh together, alone or without their box."""
    s.person()
    unit = s.rng.choice(("kilograms", "pounds", "grams", "ounces"))
    thing = s.pick((*words.GOODS, *words.CHEAP))
    each, count, box = s.number(2, 30), s.few(12), s.number(2, 20)
    slots = {
        "unit": unit,
        "thing": words.article(thing),
        "things": words.plural(thing),
        "each": each,
        "count": count,
        "box": box,
    }
    if s.chance(0.3) and steps <= 2:
        total: Number = each * count + (box if steps == 2 else 0)
        if steps == 2:
            s.say(
                "A box with {count} {things} <weighs|weighed> {n} {unit}. The empty box <weighs|weighed> {box} {unit}.",
                "{count} equal {things} in a box <weigh|weighed> {n} {unit} together with the box, which alone "
                "<weighs|weighed> {box} {unit}.",
                n=total,
                **slots,
            )
            total = s.work("Without the box, it is {eq} {unit}.", total, "-", box, **slots)
        else:
            s.say(
                "{count} [equal|] {things} <weigh|weighed> {n} {unit} [together|in all|].",
                "The weight of {count} equal {things} <is|was> {n} {unit}.",
                n=total,
                **slots,
            )
        s.ask(
            "How many {unit} does one of them weigh?",
            "How much does each weigh, in {unit}?",
            "What is the weight of one, in {unit}?",
            "How heavy is one of them, in {unit}?",
            **slots,
        )
        s.work("Each weighs {eq} {unit}.", total, "/", count, **slots)
        return
    s.say(
        "{thing} <weighs|weighed> {each} {unit}. {who} <carries|carried> {count} of them.",
        "{who} <packs|packed> {count} {things} that <weigh|weighed> {each} {unit} each.",
        "Each of {count} {things} <weighs|weighed> {each} {unit}.",
        "{count} {things} at {each} {unit} each <are|were> sent.",
        **slots,
    )
    total = s.work("The {things} weigh {eq} {unit}.", count, "*", each, **slots)
    left = steps - 1
    if left:
        s.say(
            "The box [for them|] <weighs|weighed> {box} {unit}.",
            "They <are|were> put in a box of {box} {unit}.",
            "To this <comes|came> a bag of {box} {unit}.",
            "A crate of {box} {unit} <holds|held> them.",
            **slots,
        )
        total = s.work("With that, it is {eq} {unit}.", total, "+", box, **slots)
        left -= 1
    if left:
        limit = int(total) + s.number(2, 60)
        if left == 2:
            gone = s.number(2, max(2, int(total) - 1))
            s.say("Then {n} {unit} <are|were> taken out.", "{n} {unit} of it <are|were> removed.", n=gone, **slots)
            total = s.work("{eq} {unit} are left.", total, "-", gone, **slots)
        s.ask(
            "If [up to|at most] {n} {unit} are allowed, how many {unit} could be added?",
            "How many {unit} are missing to {n} {unit}?",
            "How many {unit} below {n} {unit} is that?",
            "The limit is {n} {unit}. How many {unit} are free?",
            n=limit,
            **slots,
        )
        s.work("{eq} {unit} are free.", limit, "-", total, **slots)
        return
    s.ask(
        "How many {unit} is that [in all|altogether|]?",
        "How much does everything weigh, in {unit}?",
        "What is the total weight, in {unit}?",
        "How heavy is it all, in {unit}?",
        **slots,
    )


SITUATIONS = [
    Situation(conversion, range(1, 5), 1.5),
    Situation(cutting, range(1, 5), 1.2),
    Situation(rectangle, range(1, 6), 1.2),
    Situation(durations, range(1, 5), 1.2),
    Situation(weights, range(1, 5), 1.2),
]
