"""Fractions and percentages of a whole, classes by kind, recipes, averages."""

from __future__ import annotations

from word_problems import words
from word_problems.money import _percent
from word_problems.story import Number, Reject, Situation, Story

CROWDS = ("students", "people", "members", "workers", "guests", "animals", "children", "tourists", "runners", "players")
TRAITS = (
    ("wear glasses", "wearing glasses"),
    ("play the piano", "playing the piano"),
    ("are girls", "being girls"),
    ("like tea", "liking tea"),
    ("came by bus", "coming by bus"),
    ("have a pet", "having a pet"),
    ("wear a hat", "wearing a hat"),
    ("are older than ten", "being older than ten"),
    ("speak French", "speaking French"),
    ("eat no meat", "eating no meat"),
    ("can swim", "being able to swim"),
    ("are left-handed", "being left-handed"),
)


def fraction(s: Story, steps: int) -> None:
    """A fraction or a percentage of a crowd or a pile; then of the rest; then a change."""
    s.person()
    crowd = s.chance(0.5)
    noun = s.pick(CROWDS) if crowd else s.pick((*words.COLLECTED, *words.FOOD))
    part = s.rng.choice((2, 2, 3, 3, 4, 4, 5, 6, 8, 10))
    whole = part * s.number(2, min(s.sizes[1], 60))
    trait = s.pick(TRAITS)[0] if crowd else s.rng.choice(("red", "blue", "broken", "new", "large", "green", "old"))
    is_trait = trait if crowd else f"are {trait}"
    slots = {"noun": noun, "n": whole, "trait": is_trait, "part": words.EACH[part], "name": trait}
    s.say(
        *(
            (
                "There <are|were> {n} {noun} [in a hall|at a party|on a trip|in a club].",
                "A [group|club|school] <has|had> {n} {noun}.",
                "{n} {noun} <take|took> part in a [survey|race|course].",
                "In a village hall <sit|sat> {n} {noun}.",
            )
            if crowd
            else (
                "{who} <has|had> {n} {noun}.",
                "There <are|were> {n} {noun} in a [box|bag|bowl].",
                "{who} <buys|bought> {n} {noun}.",
                "A crate <holds|held> {n} {noun}.",
            )
        ),
        **slots,
    )
    percent = {2: 50, 4: 25, 5: 20, 10: 10}.get(part)
    if percent and s.chance(0.4):
        slots["part"] = f"{percent}%"
    s.say(
        "{Part} of them {trait}.",
        "{Part} of the {noun} {trait}.",
        "Of these, {part} {trait}.",
        "It is known that {part} of them {trait}.",
        Part=slots["part"].capitalize(),
        **slots,
    )
    some = s.work("{Part} of {n} is {eq}.", whole, "/", part, Part=slots["part"].capitalize(), **slots)
    if steps == 1:
        s.ask(
            "How many {noun} {trait}?",
            "How many [of them|] {trait}?",
            "How many {noun} is that?",
            "What number of {noun} {trait}?",
            **slots,
        )
        return
    rest = s.work("{eq} {noun} do not belong to these.", whole, "-", some, **slots)
    left = steps - 2
    if not left:
        do = "are not" if is_trait.startswith("are ") else "do not"
        verb = is_trait.removeprefix("are ")
        if is_trait.startswith(("came", "can ")):
            do, verb = ("did not", "come by bus") if is_trait.startswith("came") else ("cannot", "swim")
        s.ask(
            "How many {noun} {do} {verb}?",
            "How many [of them|] {do} {verb}?",
            "How many of the {noun} {do} {verb}?",
            "What number of {noun} {do} {verb}?",
            do=do,
            verb=verb,
            **slots,
        )
        return
    second = s.rng.choice([n for n in (2, 3, 4, 5) if rest % n == 0] or [0])
    if not second:
        raise Reject
    what = (
        s.rng.choice(("go home", "are sent away", "sit down", "leave"))
        if crowd
        else s.rng.choice(("are sold", "are given away", "are used"))
    )
    s.say(
        "Of the rest, {part} {what}.",
        "{Part} of the others {what}.",
        "{Part} of the remaining {noun} {what}.",
        "Among the others, {part} {what}.",
        part=words.EACH[second],
        Part=words.EACH[second].capitalize(),
        what=what,
        noun=noun,
    )
    gone = s.work("{Part} of {rest} is {eq}.", rest, "/", second, Part=words.EACH[second].capitalize(), rest=rest)
    left -= 1
    if not left:
        s.ask(
            "How many {noun} {what}?",
            "How many is that?",
            "How many [of them|] {what}?",
            "What number of {noun} is that?",
            what=what,
            **slots,
        )
        return
    value = s.work("Of these, {eq} {noun} are left.", rest, "-", gone, **slots)
    left -= 1
    ask = (
        "How many of the others remain?",
        "How many of the rest are left?",
        "How many others are left [then|]?",
        "What number of the others remains?",
    )
    if not left:
        s.ask(*ask)
        return
    n = s.number(2, 40)
    s.say("Then {n} more {noun} come to these.", "Later, {n} {noun} are added to those that are left.", n=n, noun=noun)
    s.ask(
        "How many are there then?",
        "How many does that make?",
        "How many {noun} are in that group then?",
        "What number is that then?",
        noun=noun,
    )
    s.work("That makes {eq} {noun}.", value, "+", n, noun=noun)


def percentage(s: Story, steps: int) -> None:
    """So many percent of a number, and what is left."""
    s.person()
    percent = s.rng.choice((10, 20, 25, 30, 40, 50, 60, 75, 80, 5, 15))
    whole = (
        s.rng.randint(1, 20) * {10: 10, 30: 10, 20: 5, 40: 5, 60: 5, 80: 5, 25: 4, 75: 4, 50: 2, 5: 20, 15: 20}[percent]
    )
    what = s.pick(
        (
            "pages",
            "questions",
            "seats",
            "trees",
            "emails",
            "students",
            "eggs",
            "tickets",
            "houses",
            "songs",
            "boxes",
            "plants",
        )
    )
    verb = {
        "pages": "read",
        "questions": "answered correctly",
        "seats": "taken",
        "emails": "unread",
        "students": "present",
        "eggs": "brown",
        "tickets": "sold",
        "houses": "empty",
        "songs": "old",
        "boxes": "full",
    }.get(what, "green")
    slots = {"what": what, "verb": verb, "n": whole, "p": percent}
    s.say(
        "There <are|were> {n} {what}.",
        "{who} <looks|looked> at {n} {what}.",
        "{who} <counts|counted> {n} {what}.",
        "A list <shows|showed> {n} {what}.",
        **slots,
    )
    s.say(
        "{p}% of them <are|were> {verb}.",
        "Of these, {p} percent <are|were> {verb}.",
        "{p} percent of the {what} <are|were> {verb}.",
        "As much as {p}% <is|was> {verb}.",
        **slots,
    )
    some = _percent(s, whole, percent)
    if steps == 1:
        s.ask(
            "How many {what} are {verb}?",
            "How many is that?",
            "How many of them are {verb}?",
            "What number of {what} is {verb}?",
            **slots,
        )
        return
    rest = s.work("{eq} {what} are not {verb}.", whole, "-", some, **slots)
    if steps == 2:
        s.ask(
            "How many {what} are not {verb}?",
            "How many [of them|] are not {verb}?",
            "How many {what} are left that are not {verb}?",
            "What number of {what} is not {verb}?",
            **slots,
        )
        return
    if some == rest:
        raise Reject
    s.ask(
        "How many more {what} are {a} than {b}?",
        "By how many do those that are {a} outnumber the others?",
        "What is the difference between both numbers?",
        "How large is the difference between the two groups?",
        a=verb if some > rest else "not " + verb,
        b="not " + verb if some > rest else verb,
        **slots,
    )
    s.work("The difference is {eq}.", max(some, rest), "-", min(some, rest))


def kinds(s: Story, steps: int) -> None:
    """A whole of several kinds: the last kind, or the whole, is asked for."""
    s.person()
    count = steps + 1
    amounts = [s.number() for _ in range(count)]
    colors = s.some(words.COLORS, count)
    things = s.pick((*words.COLLECTED, *(words.plural(thing) for thing in words.GOODS)))
    if s.chance(0.5):
        listed = ", ".join(f"{s.shown(n)} {color}" for n, color in zip(amounts[:-1], colors)) + (
            f" and {s.shown(amounts[-1])} {colors[-1]}"
        )
        s.say(
            "{who} <has|had> {listed} {things}.",
            "There <are|were> {listed} {things} in a [box|bag|shop].",
            "In a drawer, there <are|were> {listed} {things}.",
            "{who} <counts|counted> {listed} {things}.",
            listed=listed,
            things=things,
        )
        s.distract()
        s.ask(
            "How many {things} are there [in all|altogether|in total]?",
            "What is the total number of {things}?",
            "How many {things} is that [in all|]?",
            "How many {things} does that make together?",
            things=things,
        )
        total: Number = amounts[0]
        for number in amounts[1:]:
            total = s.work(["That is {eq}.", "Together, that makes {eq}."], total, "+", number)
        return
    whole: Number = sum(amounts)
    s.say(
        "{who} <has|had> {n} {things}.",
        "There <are|were> {n} {things} in a [box|bag|shop].",
        "A shelf <holds|held> {n} {things}.",
        "In all, {who} <owns|owned> {n} {things}.",
        n=whole,
        things=things,
    )
    for n, color in zip(amounts[:-1], colors):
        s.say(
            "{n} of them <are|were> {color}.",
            "{n} <are|were> {color}.",
            "{n} of the {things} <are|were> {color}.",
            "There <are|were> {n} {color} ones.",
            n=n,
            color=color,
            things=things,
        )
    last = colors[-1]
    s.say(
        "The rest <are|were> {last}.",
        "All others <are|were> {last}.",
        "The remaining ones <are|were> {last}.",
        "What is left <is|was> {last}.",
        last=last,
    )
    s.ask(
        "How many [{things}|of them] are {last}?",
        "How many {last} {things} are there?",
        "How many are {last}?",
        "What is the number of {last} {things}?",
        last=last,
        things=things,
    )
    for n, color in zip(amounts[:-1], colors):
        whole = s.work("Without the {color} ones, there are {eq}.", whole, "-", n, color=color)


def recipe(s: Story, steps: int) -> None:
    """Amounts for more or fewer portions."""
    s.person()
    dish = s.pick(
        ("pancakes", "soup", "bread", "cake", "muffins", "lemonade", "salad", "stew", "cookies", "pizza dough")
    )
    stuff = s.some(
        (
            "eggs",
            "cups of flour",
            "spoons of sugar",
            "lemons",
            "cups of milk",
            "onions",
            "grams of butter",
            "cups of rice",
            "tomatoes",
            "spoons of salt",
            "apples",
        ),
        2,
    )
    a, b, times = s.rng.randint(2, 9), s.rng.randint(2, 9), s.few(8)
    people = s.rng.randint(2, 8)
    slots = {"dish": dish, "x": stuff[0], "y": stuff[1], "a": a, "b": b, "times": times, "people": people}
    if steps == 1:
        s.say(
            "A recipe for {dish} <needs|needed> {a} {x}.",
            "{who} <uses|used> {a} {x} for one batch of {dish}.",
            "One batch of {dish} <takes|took> {a} {x}.",
            "For {dish}, {a} {x} <are|were> needed.",
            **slots,
        )
        s.ask(
            "How many {x} are needed for {times} batches?",
            "How many {x} does {who} need for {times} batches?",
            "{who} <makes|made> {times} batches. How many {x} is that?",
            "For {times} batches, how many {x} are needed?",
            **slots,
        )
        s.work("{times} batches need {eq} {x}.", a, "*", times, **slots)
        return
    if steps == 2:
        s.say(
            "A recipe for {people} people <needs|needed> {a} {x}.",
            "To make {dish} for {people} people, {who} <needs|needed> {a} {x}.",
            "For {people} portions of {dish}, {a} {x} <are|were> used.",
            "{a} {x} <make|made> {dish} for {people}.",
            **slots,
        )
        guests = people * times
        s.ask(
            "How many {x} are needed for {n} people?",
            "{n} people <come|came>. How many {x} does {who} need?",
            "How many {x} does {who} need to serve {n} people?",
            "For {n} people, how many {x} are needed?",
            n=guests,
            **slots,
        )
        factor = s.work("That is {eq} times as many people.", guests, "/", people)
        s.work("{who} needs {eq} {x}.", a, "*", factor, **slots)
        return
    s.say(
        "One batch of {dish} <needs|needed> {a} {x} and {b} {y}.",
        "A recipe for {dish} <asks|asked> for {a} {x} and {b} {y}.",
        "{who} <puts|put> {a} {x} and {b} {y} into each batch of {dish}.",
        "For a batch of {dish}, {a} {x} and {b} {y} <are|were> needed.",
        **slots,
    )
    s.say(
        "{who} <makes|made> {times} batches.",
        "{times} batches <are|were> planned.",
        "{times} batches of it <are|were> made.",
        "The plan <is|was> to make {times} batches.",
        **slots,
    )
    one = s.work("{times} batches need {eq} {x}.", a, "*", times, **slots)
    two = s.work("{times} batches need {eq} {y}.", b, "*", times, **slots)
    if s.chance(0.5) and one != two:
        big = stuff[0] if one > two else stuff[1]
        small = stuff[1] if one > two else stuff[0]
        s.ask(
            "How many more {big} than {small} are needed?",
            "How many fewer {small} than {big} does {who} need?",
            "By how many do the {big} exceed the {small}?",
            "How large is the difference between {big} and {small}?",
            big=big,
            small=small,
        )
        s.work("That is {eq} more {big}.", max(one, two), "-", min(one, two), big=big)
        return
    s.ask(
        "How many {x} and {y} are needed [in all|altogether]?",
        "What is the total number of {x} and {y}?",
        "How many {x} and {y} is that together?",
        "How many things does {who} need in all?",
        **slots,
    )
    s.work("Together, that is {eq}.", one, "+", two)


def average(s: Story, steps: int) -> None:
    """The mean of some numbers; or a missing one."""
    s.person()
    count = steps
    unit = s.rng.choice(("points", "goals", "pages", "miles", "dollars", "fish", "cups", "laps", "phone calls"))
    mean = s.number(5, 60)
    amounts = [max(1, mean + s.rng.randint(-4, 4)) for _ in range(count - 1)]
    last = mean * count - sum(amounts)
    if last < 1:
        raise Reject
    amounts.append(last)
    listed = ", ".join(s.shown(n) for n in amounts[:-1]) + f" and {s.shown(amounts[-1])}"
    s.say(
        "In {k} [games|days|weeks], {who} <has|had> {listed} {unit}.",
        "{who}'s results in {k} rounds <are|were> {listed} {unit}.",
        "On {k} days, {who} <counts|counted> {listed} {unit}.",
        "{who} <notes|noted> {listed} {unit} on {k} days.",
        k=count,
        listed=listed,
        unit=unit,
    )
    s.ask(
        "What is the average [number of {unit}|]?",
        "How many {unit} is that on average?",
        "What is {his} average?",
        "What is the mean?",
        unit=unit,
    )
    total: Number = amounts[0]
    for n in amounts[1:]:
        total = s.work("That is {eq}.", total, "+", n)
    s.work("The average is {eq}.", total, "/", count)


SITUATIONS = [
    Situation(fraction, range(1, 6), 2.5),
    Situation(percentage, range(1, 4), 1.2),
    Situation(kinds, range(1, 5), 1.5),
    Situation(recipe, range(1, 4), 1.0),
    Situation(average, range(3, 5), 0.8),
]
