"""A number of things that grows and shrinks; what it is in the end, was at first, or by how much it changed."""

from __future__ import annotations

from word_problems import words
from word_problems.scenes import GROUPS, SCENES, Scene
from word_problems.story import Number, Reject, Situation, Story, upper

LINKS = ("", "", "then", "later,", "after that,", "the next day,", "on {day},", "next,", "soon after,")


def ledger(s: Story, steps: int) -> None:
    """Some things, changed again and again; at times counted in boxes at first, shared or sold in the end."""
    scene = s.rng.choice(SCENES)
    _set(s, scene)
    left = steps
    end = s.rng.choice(scene.ends) if scene.ends and left > 1 and s.chance(0.45) else ""
    left -= bool(end)
    lots = scene.lots and left > 1 and s.chance(0.25)
    have: Number
    if lots and not scene.crowd and s.slots["things"] != "dollars" and s.slots["things"] != "points":
        count, each = s.few(), s.number(2, min(s.sizes[1], 40))
        s.say(
            "{who} <has|had> {count} {boxes} of {things} with {n} [in each|{things} in each {box}].",
            "{who} <has|had> {count} {boxes}. Each [of them|{box}] <holds|held> {n} {things}.",
            "{who} <buys|bought> {count} {boxes} of {things}. There <are|were> {n} {things} in each {box}.",
            "{who} <fills|filled> {count} {boxes} with {n} {things} each.",
            count=count,
            n=each,
        )
        have = s.work(
            ["{who} has {eq} {things}.", "{count} {boxes} hold {eq} {things}."], count, "*", each, count=count
        )
        left -= 1
    else:
        have = s.number()
        s.say(*scene.starts, n=have)
    s.distract()
    first = True
    while left:
        last = left == 1 and not end
        have, used = _change(s, scene, have, left, first, last and s.chance(0.3))
        left -= used
        first = False
    if end:
        ENDS[end](s, have)
    elif not s.question:
        s.ask(*scene.asks)


def _set(s: Story, scene: Scene) -> None:
    s.person()
    s.person("other")
    box = s.pick(words.BOXES)
    goods = s.pick(words.GOODS)
    things = s.pick(scene.things)
    s.set(things=things, unit=things.split(" ")[0], box=box, boxes=words.plural(box), kin=s.pick(words.RELATIVES))
    s.set(day=s.pick(words.DAYS), good=goods, goods=words.plural(goods))
    if words.article(goods)[1] == "n":
        s.set(good="new " + goods)


def _change(s: Story, scene: Scene, have: Number, left: int, first: bool, condition: bool) -> tuple[Number, int]:
    """One gain or loss, told and worked out: what there is then, and the steps it took (1 or 2)."""
    many = left > 1 and s.chance(0.35)
    gain = s.chance(0.5)
    forms = (scene.lots if gain else scene.lots_lost) if many else ()
    sign = "+" if gain else "-"
    if not forms and left > 1 and not gain and s.chance(0.12):
        return _half(s, scene, have), 2
    if forms:
        count, each = s.few(), s.number(2, 30)
        amount: Number = count * each
    else:
        forms, count, each = scene.gains if gain else scene.losses, 0, s.number()
        amount = each
    if not gain and amount >= have:
        raise Reject
    clause = s.phrase(*forms, n=each, count=count)
    if condition:
        question = s.phrase(*scene.asks[:-1])
        s.question = f"If {clause}, {question[0].lower()}{question[1:]}"
    else:
        link = s.fill(s.rng.choice(("",) if first and s.chance(0.5) else LINKS), {}, s.shown)
        s.sentences.append(upper(f"{link} {clause}.".strip()))
    used = 1
    if count:
        verb = s.rng.choice(("That is", "This makes") if gain else ("That is", "This takes away"))
        amount = s.work(verb + " {eq} {things}.", count, "*", each)
        used = 2
    adverb = s.rng.choice((" now", "", " then") if gain else (" left", " left", " now"))
    return s.work(f"{scene.state} {{eq}} {{things}}{adverb}.", have, sign, amount), used


def _half(s: Story, scene: Scene, have: Number) -> Number:
    """A share of the things goes."""
    part = s.rng.choice((2, 2, 2, 3, 4, 5))
    s.sentences.append(
        s.phrase(
            *(
                ("{Part} of them <are|were> gone the next day.", "After an hour, {part} of them <leave|left>.")
                if scene.crowd
                else (
                    "Then {who} <gives|gave> {part} of what {he} <has|had> to {other}.",
                    "{who} then <loses|lost> {part} of [them|the {things}].",
                    "After that, {he} <gives|gave> away {part} of {his} {things}.",
                    "{Part} of what {he} <has|had> <goes|went> to {other}.",
                )
            ),
            part=words.FRACTIONS[part],
            Part=words.FRACTIONS[part].capitalize(),
        )
    )
    gone = s.work("{Part} of {have} is {eq}.", have, "/", part, Part=words.FRACTIONS[part], have=have)
    return s.work(f"{scene.state} {{eq}} {{things}} left.", have, "-", gone)


def _share(s: Story, have: Number) -> None:
    people = s.divisor(have)
    money = s.slots["things"] == "dollars"
    s.ask(
        "If {who} shares [them|the {things}|what is left] equally among {n} [friends|children|people], how many "
        "{things} does each [one|of them|] get?",
        "{He} then <divides|divided> them equally among {n} [friends|cousins|classmates]. How many {things} does each "
        "one get?",
        "How many {things} does each of {n} [friends|people] get if {who} splits [them|the rest] evenly?",
        "If {n} [people|friends] share [them|what is there now] equally, how many {things} [will|does] each get?",
        n=people,
        He=s.slots["he"].capitalize(),
    )
    unit = "dollars" if money else "{things}"
    s.work([f"Each one gets {{eq}} {unit}.", f"That is {{eq}} {unit} for each."], have, "/", people)


def _pack(s: Story, have: Number) -> None:
    size = s.divisor(have)
    if s.slots["things"] in (*words.ANIMALS, *GROUPS):
        s.ask(
            "If they are put in groups of {n}, how many groups are there?",
            "They are [then|] divided into groups of {n}. How many groups are there?",
            "How many groups of {n} can be formed [from them|]?",
            "Into how many groups of {n} can they be divided?",
            n=size,
        )
        s.work(["There are {eq} groups.", "That makes {eq} groups."], have, "/", size)
        return
    s.ask(
        "If {n} {things} fit in [a|each] {box}, how many {boxes} are needed [for them|]?",
        "They are [then|] put into {boxes} of {n} [each|]. How many {boxes} are there?",
        "How many {boxes} of {n} {things} [each|] can be filled with them?",
        "How many {boxes} are needed if each {box} holds {n} {things}?",
        "How many {boxes} with {n} {things} each does that make?",
        n=size,
    )
    s.work(["That fills {eq} {boxes}.", "There are {eq} {boxes}.", "{eq} {boxes} are needed."], have, "/", size)


def _need(s: Story, have: Number) -> None:
    assert isinstance(have, int)
    goal = have + s.number(2, max(10, have))
    s.ask(
        "How many more {things} are needed to [have|reach] {n}?",
        "The goal is {n} {things}. How many [more|] are [still missing|missing|needed]?",
        "How many more {things} would it take to [get to|have] {n}?",
        "{n} {things} are wanted in the end. How many are lacking?",
        n=goal,
    )
    s.work(["{eq} {things} are missing.", "It takes {eq} more {things}."], goal, "-", have)


def _sell(s: Story, have: Number) -> None:
    price = s.number(2, 12)
    s.ask(
        "If they are sold for {n} [each|apiece], how much money is that?",
        "[All of them|They] are then sold for {n} each. How much money [comes in|is made]?",
        "How much money [would|does] selling all of them at {n} each bring?",
        "How much are they worth in all, at {n} each?",
        n=s.dollars(price),
    )
    s.work(["They bring in {eq} dollars.", "That is {eq} dollars."], have, "*", price)


ENDS = {"share": _share, "pack": _pack, "need": _need, "sell": _sell}


def unknown(s: Story, steps: int) -> None:
    """The end is known; asked is what there was at first, or what came or went."""
    scene = s.rng.choice([scene for scene in SCENES if scene.lots or scene.lots_lost])
    _set(s, scene)
    amounts = [s.number() for _ in range(steps)]
    gains = [s.chance(0.5) for _ in range(steps)]
    start = s.number()
    have, seen = start, [start]
    for amount, gain in zip(amounts, gains):
        have += amount if gain else -amount
        if have <= 0:
            raise Reject
        seen.append(have)
    asked_start = s.chance(0.5) or steps > 1
    things = s.slots["things"]
    of = "dollars" if things == "dollars" else "{things}"
    if asked_start:
        s.say(
            "{who} <has|had> some {things}." if not scene.crowd else "There <are|were> some {things} at first.",
            *(("At first, {who} <has|had> some {things}.",) if not scene.crowd else ()),
        )
        for number, (amount, gain) in enumerate(zip(amounts, gains)):
            clause = s.phrase(*(scene.gains if gain else scene.losses), n=amount)
            link = s.fill(s.rng.choice(LINKS), {}, s.shown) if number else ""
            s.sentences.append(upper(f"{link} {clause}.".strip()))
        s.say(
            "Now there are {n} {things}." if scene.crowd else "Now {who} has {n} {things}.",
            "In the end, [there are|it comes to] {n} {things}.",
            "That leaves {n} {things}." if not gains[-1] else "That makes {n} {things}.",
            "{n} {things} are there now.",
            n=have,
        )
        s.ask(
            "How many {things} were there at first?" if scene.crowd else "How many {things} did {who} have at first?",
            "How many {things} were there [in the beginning|to begin with|before]?",
            "With how many {things} did it start?",
            "What was the number of {things} at the beginning?",
        )
        value: Number = have
        for number in range(steps - 1, -1, -1):
            sign = "-" if gains[number] else "+"
            place = "At first" if number == 0 else "Before that"
            value = s.work(f"{place}, there were {{eq}} {of}.", value, sign, amounts[number])
        return
    s.say(*scene.starts, n=start)
    gain = gains[0]
    s.distract()
    s.say(
        *(
            (
                "Then some more [{things}|] <are|were> added.",
                "Some more {things} <come|came>.",
                "Then there <are|were> more {things}.",
                "A number of {things} <are|were> added.",
            )
            if gain
            else (
                "Then some [{things}|of them] <are|were> taken away.",
                "Some of the {things} <are|were> gone later.",
                "Then some of them <are|were> given away.",
                "A number of them <are|were> taken.",
            )
        )
    )
    s.say(
        "Now there are {n} {things} [in all|]." if gain else "Now there are {n} {things} left.",
        "In the end, there <are|were> {n} {things}.",
        "{n} {things} are there now.",
        "It <is|was> {n} {things} afterwards.",
        n=have,
    )
    s.ask(
        "How many {things} were added?" if gain else "How many {things} were taken away?",
        "How many {things} [came|were new]?" if gain else "How many {things} [went away|are gone]?",
    )
    if gain:
        s.work("{eq} " + of + " were added.", have, "-", start)
    else:
        s.work("{eq} " + of + " are gone.", start, "-", have)


def two_piles(s: Story, steps: int) -> None:
    """Two kinds of things; both are told of, one is asked for."""
    s.person()
    s.person("other")
    pool = s.rng.choice((words.COLLECTED, words.FOOD))
    one, two = s.some(pool, 2)
    a, b = s.number(), s.number()
    s.say(
        "{who} <has|had> {a} {one} and {b} {two}.",
        "{who} <brings|brought> {a} {one} and {b} {two} to {other}'s house.",
        "There <are|were> {a} {one} and {b} {two} on a table.",
        "{other} <gives|gave> {who} {a} {one} and {b} {two}.",
        "On a shelf <are|were> {a} {one} and {b} {two}.",
        a=a,
        b=b,
        one=one,
        two=two,
    )
    have: dict[str, Number] = {one: a, two: b}
    asked = s.rng.choice((one, two, "both")) if steps > 1 else s.rng.choice((one, two, "more"))
    if asked == "more":
        if a == b:
            raise Reject
        big, small = (one, two) if a > b else (two, one)
        s.ask(
            "How many more {big} than {small} are there?",
            "How many fewer {small} than {big} are there?",
            "By how many do the {big} outnumber the {small}?",
            "What is the difference between the numbers of {big} and {small}?",
            big=big,
            small=small,
        )
        s.work("There are {eq} more {big}.", have[big], "-", have[small], big=big)
        return
    needed = steps - (asked == "both")
    events = [asked if asked != "both" else s.rng.choice((one, two)) for _ in range(needed)]
    noise = {one: two, two: one}.get(asked)
    if noise:
        events.insert(s.rng.randrange(len(events) + 1), noise)
    for which in events:
        amount = s.number(2, max(3, int(have[which]) - 1))
        gain = s.chance(0.4)
        if not gain and amount >= have[which]:
            raise Reject
        s.say(
            *(
                (
                    "Then {who} <gets|got> {n} more {which}.",
                    "{other} <brings|brought> {n} more {which}.",
                    "{who} <buys|bought> {n} more {which}.",
                    "{n} more {which} <come|came> to it.",
                )
                if gain
                else (
                    "{who} <gives|gave> away {n} {which}.",
                    "{other} <takes|took> {n} of the {which}.",
                    "Then {n} of the {which} <are|were> [used|given to {other}|sold].",
                    "{who} <parts|parted> with {n} {which}.",
                )
            ),
            n=amount,
            which=which,
        )
        if which == noise:
            continue
        have[which] = s.work(
            "There are {eq} {which} [now|then]." if gain else "There are {eq} {which} left.",
            have[which],
            "+" if gain else "-",
            amount,
            which=which,
        )
    if asked == "both":
        s.ask(
            "How many {one} and {two} are there [in all|altogether|in total] [now|]?",
            "How many things does that make in total?",
            "What is the total number of {one} and {two} now?",
            "How many {one} and {two} does that make together?",
            one=one,
            two=two,
        )
        s.work("Together, there are {eq}.", have[one], "+", have[two])
    else:
        s.ask(
            "How many {which} are [left|there now]?",
            "How many {which} [remain|does {who} have now]?",
            "How many {which} does that leave?",
            "What is the number of {which} now?",
            which=asked,
        )


SITUATIONS = [
    Situation(ledger, range(1, 6), 6.0),
    Situation(unknown, range(1, 3), 2.0),
    Situation(two_piles, range(1, 5), 2.0),
]
