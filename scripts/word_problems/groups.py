"""Equal groups: totals, differences, sharing, packing and what is left over."""

from __future__ import annotations

from word_problems import words
from word_problems.story import Number, Reject, Situation, Story

UNITS = (
    ("boxes", "box"),
    ("bags", "bag"),
    ("rows", "row"),
    ("tables", "table"),
    ("shelves", "shelf"),
    ("teams", "team"),
    ("baskets", "basket"),
    ("packs", "pack"),
    ("trays", "tray"),
    ("piles", "pile"),
    ("crates", "crate"),
    ("pages", "page"),
    ("jars", "jar"),
    ("drawers", "drawer"),
    ("bunches", "bunch"),
    ("trucks", "truck"),
)


def _kind(s: Story) -> str:
    return s.pick((*words.COLLECTED, *words.FOOD, *(words.plural(thing) for thing in words.GOODS)))


def _groups(s: Story, things: str, more: bool) -> Number:
    """Tell of equal groups and work out how many things that is."""
    units, unit = s.pick(UNITS)
    count, each = s.few(15), s.number(2, min(s.sizes[1], 60))
    slots = {"units": units, "unit": unit, "count": count, "each": each, "things": things}
    s.say(
        *(
            (
                "There <are|were> also {count} {units} of {each} {things} [each|].",
                "{who} also <has|had> {count} {units} with {each} {things} [each|in each of them].",
                "Besides, there <are|were> {count} {units}, each with {each} {things}.",
                "{count} other {units} <hold|held> {each} {things} each.",
            )
            if more
            else (
                "There <are|were> {count} {units} of {things}, with {each} {things} in each {unit}.",
                "{who} <has|had> {count} {units} of {things} with {each} [{things}|] in each.",
                "{who} <puts|put> {each} {things} in each of {count} {units}.",
                "{count} {units} <hold|held> {each} {things} each.",
                "There <are|were> {each} {things} in each of the {count} {units}.",
                "Each {unit} <has|had> {each} {things}, and there <are|were> {count} {units}.",
            )
        ),
        **slots,
    )
    return s.work(
        ["There are {eq} {things} in the {units}.", "{count} {units} of {each} {things} make {eq} {things}."],
        count,
        "*",
        each,
        **slots,
    )


def equal_groups(s: Story, steps: int) -> None:
    """One or two sorts of groups; a total or a difference, then a change, a share or a price."""
    s.person()
    s.person("other")
    one = _kind(s)
    total = _groups(s, one, False)
    left = steps - 1
    things = one
    if left >= 2 and s.chance(0.6):
        same = s.chance(0.5)
        two = one if same else _kind(s)
        second = _groups(s, two, True)
        left -= 1
        if left == 1 and s.chance(0.3) and not same and total != second:
            big, small = (one, two) if total > second else (two, one)
            s.ask(
                "How many more {big} than {small} are there?",
                "By how many do the {big} outnumber the {small}?",
                "How many fewer {small} than {big} are there?",
                "What is the difference between the numbers of {big} and {small}?",
                big=big,
                small=small,
            )
            s.work("There are {eq} more {big}.", max(total, second), "-", min(total, second), big=big)
            return
        things = one if same else "things"
        total = s.work("In all, there are {eq} {things}.", total, "+", second, things=things)
        left -= 1
        if same is False and left == 0:
            s.ask(
                "How many {one} and {two} are there [in all|altogether|in total]?",
                "What is the total number of {one} and {two}?",
                "How many things does {who} have [in all|altogether]?",
                "How many {one} and {two} does that make together?",
                one=one,
                two=two,
            )
            return
    s.distract()
    while left > 1:
        total = _changed(s, total, things)
        left -= 1
    if left:
        _last(s, total, things)
        return
    s.ask(
        "How many {things} are there [in all|altogether|in total]?",
        "How many {things} does {who} have [in all|altogether|in total]?",
        "What is the total number of {things}?",
        "How many {things} is that [altogether|in all]?",
        "How many {things} does that make?",
        things=things,
    )


def _changed(s: Story, total: Number, things: str) -> Number:
    gain = s.chance(0.4)
    n = s.number(2, max(2, min(int(total) - 1, 200)))
    s.say(
        *(
            (
                "Then {n} more {things} <are|were> added.",
                "{other} <adds|added> {n} {things}.",
                "{who} <gets|got> {n} more {things}.",
                "{n} more <turn|turned> up.",
            )
            if gain
            else (
                "{n} of the {things} <are|were> [used|broken|sold|given away].",
                "{who} <gives|gave> {n} of them away.",
                "{other} <takes|took> {n} {things}.",
                "{n} {things} <get|got> lost.",
            )
        ),
        n=n,
        things=things,
    )
    return s.work(
        "Now there are {eq} {things}." if gain else "That leaves {eq} {things}.",
        total,
        "+" if gain else "-",
        n,
        things=things,
    )


def _last(s: Story, total: Number, things: str) -> None:
    kind = s.rng.choice(("share", "price", "rest", "rest", "goal"))
    if kind == "share":
        n = s.divisor(total)
        s.ask(
            "If {n} [friends|people|children] share them equally, how many {things} does each get?",
            "They <are|were> shared equally among {n} people. How many {things} did each get?",
            "How many {things} does each of {n} people get if they share them evenly?",
            "Split evenly among {n} people, how many {things} is that for each?",
            n=n,
            things=things,
        )
        s.work("Each one gets {eq} {things}.", total, "/", n, things=things)
    elif kind == "price":
        n = s.number(2, 12)
        s.ask(
            "If each of them costs {n}, how much do they all cost?",
            "At {n} each, how much [is that|do they cost] [in total|altogether]?",
            "Each one is sold for {n}. How much money is that [in all|]?",
            "What do all of them cost at {n} apiece?",
            n=s.dollars(n),
        )
        s.work("They cost {eq} dollars.", total, "*", n)
    elif kind == "goal":
        goal = int(total) + s.number(2, 40)
        s.ask(
            "If {n} {things} are needed, how many are missing?",
            "How many more {things} are needed to have {n}?",
            "{who} <needs|needed> {n} {things}. How many more does {he} have to get?",
            "How many are lacking if {n} {things} are wanted?",
            n=goal,
            things=things,
        )
        s.work("{eq} {things} are missing.", goal, "-", total, things=things)
    else:
        n = s.number(2, max(2, min(int(total) - 1, 200)))
        s.ask(
            "If {n} of them are [sold|used|given away], how many {things} are left?",
            "{who} <gives|gave> {n} of them to {other}. How many {things} are left?",
            "{n} {things} <are|were> [lost|broken|sold] later. How many remain?",
            "After {n} {things} are taken away, how many remain?",
            n=n,
            things=things,
        )
        s.work("{eq} {things} are left.", total, "-", n, things=things)


def sharing(s: Story, steps: int) -> None:
    """Things gathered, then shared or packed in equal groups; then perhaps something happens to one group."""
    s.person()
    s.person("other")
    things = _kind(s)
    per = s.number(2, min(s.sizes[1], 40))
    count = s.few()
    total = per * count
    left = steps
    have: Number
    if left >= 2 and s.chance(0.75):
        if s.chance(0.5):
            part = s.number(1, total - 1)
            parts = (part, total - part)
            s.say(
                "{who} <has|had> {a} {things} and {other} <has|had> {b}.",
                "{who} <buys|bought> {a} {things} and {other} <buys|bought> {b} {things}.",
                "{who} <has|had> {a} {things} and then <gets|got> {b} more.",
                "To {a} {things}, {who} <adds|added> {b} more.",
                a=parts[0],
                b=parts[1],
                things=things,
            )
            have = s.work("In all, there are {eq} {things}.", parts[0], "+", parts[1], things=things)
        else:
            gone = s.number(2, max(2, total))
            s.say(
                "{who} <has|had> {a} {things} but {b} of them <are|were> [broken|lost|sold|given away].",
                "{who} <has|had> {a} {things} and <gives|gave> {b} of them to {other}.",
                "Of {a} {things}, {who} <keeps|kept> {b} for later and <shares|shared> the rest.",
                "{a} {things} <were|were> there, but {b} <are|were> taken away.",
                a=total + gone,
                b=gone,
                things=things,
            )
            have = s.work("{eq} {things} are left to share.", total + gone, "-", gone, things=things)
        left -= 1
    else:
        s.say(
            "{who} <has|had> {n} {things}.",
            "There <are|were> {n} {things}.",
            "{who} <buys|bought> {n} {things}.",
            "A total of {n} {things} <is|was> there.",
            n=total,
            things=things,
        )
        have = total
    s.distract()
    units, unit = s.pick(UNITS)
    people = s.rng.choice(("friends", "children", "students", "families", "neighbors", "cousins"))
    if s.chance(0.5):
        told = (
            "{He} <divides|divided> them equally among {n} {people}.",
            "{He} <puts|put> the same number of them into each of {n} {units}.",
            "They <are|were> shared equally by {n} {people}.",
            "Each of {n} {people} <gets|got> the same number of them.",
        )
        ask = (
            "How many {things} is that for each?",
            "How many {things} does each one [get|have]?",
            "How many {things} go to each?",
            "What number of {things} does each get?",
        )
        n: Number = count
        line = "Each gets {eq} {things}."
        noun = things
    else:
        told = (
            "{He} <puts|put> them in {units} of {n}.",
            "{He} <wants|wanted> to put {n} in each {unit}.",
            "{n} of them <go|went> into each {unit}.",
            "A {unit} <holds|held> {n} of them.",
        )
        ask = (
            "How many {units} [are there|does {he} need|are needed]?",
            "How many {units} can {he} fill?",
            "How many {units} does that make?",
            "What number of {units} is needed?",
        )
        n = per
        line = "That makes {eq} {units}."
        noun = units
    slots = {"n": n, "units": units, "unit": unit, "people": people, "things": things, "He": s.slots["he"].capitalize()}
    s.say(*told, **slots)
    result = s.work(line, have, "/", n, **slots)
    left -= 1
    if not left:
        s.ask(*ask, **slots)
        return
    while left > 1:
        extra = s.number(2, 20)
        s.say(
            "Then {n} more {noun} <are|were> added." if noun == units else "Then each <gets|got> {n} more {noun}.",
            "{who} <gets|got> {n} {noun} on top." if noun == units else "{n} {noun} more <are|were> given to each.",
            n=extra,
            noun=noun,
        )
        result = s.work("That makes {eq} {noun}.", result, "+", extra, noun=noun)
        left -= 1
    if noun == units:
        price = s.number(2, 15)
        s.ask(
            "If each {unit} is sold for {n}, how much money is that?",
            "Each {unit} costs {n}. How much do they cost [together|in all]?",
            "How much money do the {units} bring at {n} each?",
            "What are all the {units} worth at {n} apiece?",
            **{**slots, "n": s.dollars(price)},
        )
        s.work("That is {eq} dollars.", result, "*", price)
    else:
        n = s.number(2, max(2, int(result) - 1))
        s.ask(
            "If one of them then uses {n} of these, how many {things} does that one have left?",
            "One of them loses {n} of these {things}. How many does that one have left?",
            "How many {things} does one have left after giving away {n}?",
            "When {n} of one share are gone, how many {things} are left of it?",
            n=n,
            things=things,
        )
        s.work("{eq} {things} are left.", result, "-", n, things=things)


def leftover(s: Story, steps: int) -> None:
    """Groups that do not come out even: how many are full, what is left over, or how many are needed."""
    s.person()
    things = _kind(s)
    size, full = s.few(), s.number(2, 20)
    rest = s.rng.randint(1, size - 1)
    total = size * full + rest
    have: Number = total
    if steps == 3:
        part = s.number(1, total - 1)
        s.say(
            "{who} <has|had> {a} {things} and <buys|bought> {b} more.",
            "{who} <has|had> {a} old and {b} new {things}.",
            "There <are|were> {a} {things} on one table and {b} on another.",
            "{a} {things} <are|were> there, and {b} more <come|came>.",
            a=part,
            b=total - part,
            things=things,
        )
        have = s.work("There are {eq} {things}.", part, "+", total - part, things=things)
    else:
        s.say(
            "{who} <has|had> {n} {things}.",
            "There <are|were> {n} {things}.",
            "{who} <collects|collected> {n} {things}.",
            "A box <holds|held> {n} {things}.",
            n=total,
            things=things,
        )
    units, unit = s.pick(UNITS)
    slots = {"things": things, "units": units, "unit": unit, "n": size, "full": full}
    if s.chance(0.5):
        s.say(
            "{He} <puts|put> {n} of them in each {unit} until no more full {units} can be made.",
            "{He} <fills|filled> as many {units} of {n} as possible.",
            "They <are|were> packed in full {units} of {n}.",
            "{n} of them <make|made> a full {unit}.",
            **slots,
            He=s.slots["he"].capitalize(),
        )
        s.ask(
            "How many {things} are left over?",
            "How many {things} do not fit in a full {unit}?",
            "How many {things} remain?",
            "What number of {things} is left without a full {unit}?",
            **slots,
        )
        s.work("The {full} full {units} hold {eq} {things}.", full, "*", size, **slots)
        s.work("{eq} {things} are left over.", have, "-", size * full, **slots)
        return
    s.ask(
        "If a {unit} holds {n} [of them|{things}], how many {units} are needed for all of them?",
        "Each {unit} holds {n}. How many {units} are needed so that all {things} find a place?",
        "How many {units} does {he} need for all of them if {n} fit in one?",
        "All of them are to be put in {units} of at most {n}. What is the smallest number of {units}?",
        **slots,
    )
    s.work("{full} full {units} hold {eq} {things}, which is not enough.", full, "*", size, **slots)
    s.work("With one more, that is {eq} {units}.", full, "+", 1, **slots)


def grid(s: Story, steps: int) -> None:
    """Rows and columns, floors and rooms, days and hours: products of two or three numbers."""
    s.person()
    s.person("other")
    a, b, c = s.few(), s.few(20), s.few(9)
    things = s.pick((*words.PLANTS, *words.COLLECTED))
    form = s.rng.choice(("rows", "house", "school", "hall"))
    third = steps >= 2 and s.chance(0.5)
    if form == "rows":
        s.say(
            "{who} <arranges|arranged> {things} in {a} rows with {b} in each row.",
            "A field <has|had> {a} rows of {b} {things}.",
            "{who} <plants|planted> {a} rows of {b} {things} each.",
            "There <are|were> {b} {things} in every one of {a} rows.",
            a=a,
            b=b,
            things=things,
        )
        line, noun = "There are {eq} {things}.", things
        more, which = "There <are|were> {c} such [fields|gardens].", "fields"
    elif form == "house":
        s.say(
            "A [building|hotel|tower] <has|had> {a} floors with {b} rooms on each floor.",
            "On each of the {a} floors of a hotel there <are|were> {b} rooms.",
            "A house <has|had> {a} stories of {b} rooms each.",
            "Each floor of a building with {a} floors <has|had> {b} rooms.",
            a=a,
            b=b,
        )
        line, noun = "There are {eq} rooms.", "rooms"
        more, which = "There <are|were> {c} such buildings.", "buildings"
    elif form == "school":
        s.say(
            "A school <has|had> {a} classes of {b} students.",
            "There <are|were> {b} students in each of the {a} classes of a school.",
            "{a} classes with {b} students each <go|went> on a trip.",
            "Each of {a} classes <counts|counted> {b} students.",
            a=a,
            b=b,
        )
        line, noun = "There are {eq} students.", "students"
        more, which = "Each student <needs|needed> {c} [pencils|tickets|books].", "items"
    else:
        s.say(
            "A [theater|hall|stadium block] <has|had> {a} rows of {b} seats.",
            "In a cinema there <are|were> {a} rows with {b} seats each.",
            "Each of the {a} rows of a hall <has|had> {b} seats.",
            "A stage <is|was> faced by {a} rows of {b} seats each.",
            a=a,
            b=b,
        )
        line, noun = "There are {eq} seats.", "seats"
        more, which = "There <are|were> {c} such halls.", "halls"
    total = s.work(line, a, "*", b, things=things)
    left = steps - 1
    if third:
        s.say(more, c=c)
        if which == "items":
            noun = "items"
        total = s.work("In all, that is {eq} {noun}.", total, "*", c, noun=noun)
        left -= 1
    while left > 1:
        total = _changed(s, total, noun)
        left -= 1
    if left:
        n = s.number(2, max(2, min(int(total) - 1, 300)))
        word = {"seats": "taken", "rooms": "occupied", "students": "absent"}.get(noun, "gone")
        s.ask(
            "If {n} of them are {word}, how many are not?",
            "{n} of the {noun} <are|were> {word}. How many {noun} are not?",
            "How many {noun} are not {word} if {n} are?",
            "When {n} {noun} are {word}, what number is not?",
            n=n,
            noun=noun,
            word=word,
        )
        s.work("{eq} {noun} are not {word}.", total, "-", n, noun=noun, word=word)
        return
    s.ask(
        "How many {noun} are there [in all|altogether|in total]?",
        "What is the total number of {noun}?",
        "How many {noun} is that [altogether|in all]?",
        "How many {noun} does that make?",
        noun=noun,
    )
    if s.answer is None:
        raise Reject


SITUATIONS = [
    Situation(equal_groups, range(1, 6), 3.0),
    Situation(sharing, range(1, 5), 3.0),
    Situation(leftover, range(2, 4), 1.0),
    Situation(grid, range(1, 5), 1.2),
]
