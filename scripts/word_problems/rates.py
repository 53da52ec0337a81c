"""Speed, reading, making, using up: so much per hour, day or week."""

from __future__ import annotations

from word_problems import words
from word_problems.story import Number, Situation, Story


def travel(s: Story, steps: int) -> None:
    """Distances, speeds and times, in one or several legs."""
    s.person()
    thing, speeds = s.rng.choice(
        (
            ("car", (30, 90)),
            ("train", (40, 120)),
            ("bicycle", (8, 25)),
            ("boat", (10, 40)),
            ("bus", (25, 70)),
            ("truck", (30, 80)),
        )
    )
    unit = s.rng.choice(("miles", "kilometers"))
    slots = {"thing": thing, "unit": unit, "mile": unit[:-1]}
    left = steps
    total: Number | None = None
    while left:
        first = total is None
        speed, hours = s.number(*speeds), s.few(9)
        if thing != "bicycle" and s.chance(0.6):
            speed = max(10, speed // 5 * 5)
        if first and left == 1 and s.chance(0.5):
            s.say(
                "{who} <has|had> to go {n} {unit} by {thing}.",
                "The way to {place} <is|was> {n} {unit} long.",
                "A {thing} <goes|went> {n} {unit}.",
                "{n} {unit} <lie|lay> before a {thing}.",
                n=speed * hours,
                place=s.rng.choice(("the coast", "the city", "the lake", "the next town")),
                **slots,
            )
            if s.chance(0.6):
                s.ask(
                    "At {n} {unit} per hour, how many hours does it take?",
                    "If it goes {n} {unit} an hour, how long does it take in hours?",
                    "The speed is {n} {unit} per hour. How many hours does the trip last?",
                    "How many hours does that take at {n} {unit} per hour?",
                    n=speed,
                    **slots,
                )
                s.work("It takes {eq} hours.", speed * hours, "/", speed)
            else:
                s.ask(
                    "It takes {n} hours. What is the average speed, in {unit} per hour?",
                    "If that takes {n} hours, how many {unit} is it per hour?",
                    "How fast is it, in {unit} per hour, if it takes {n} hours?",
                    "{n} hours pass on the way. What is the speed, in {unit} per hour?",
                    n=hours,
                    **slots,
                )
                s.work("The speed is {eq} {unit} per hour.", speed * hours, "/", hours, **slots)
            return
        if first or (left >= 2 and s.chance(0.5)):
            s.say(
                *(
                    (
                        "{who} <travels|traveled> by {thing} at {speed} {unit} per hour for {hours} hours.",
                        "A {thing} <goes|went> {speed} {unit} per hour for {hours} hours.",
                        "{who} <goes|went> {speed} {unit} an hour for {hours} hours.",
                        "For {hours} hours, a {thing} <moves|moved> at {speed} {unit} per hour.",
                        "A {thing} <covers|covered> {speed} {unit} each hour and <is|was> on the road for {hours} "
                        "hours.",
                    )
                    if first
                    else (
                        "Then it <goes|went> {speed} {unit} per hour for {hours} hours.",
                        "After a break, {hours} hours at {speed} {unit} per hour <follow|followed>.",
                        "Then {hours} more hours at {speed} {unit} per hour <come|came>.",
                        "The next {hours} hours <are|were> at {speed} {unit} per hour.",
                    )
                ),
                speed=speed,
                hours=hours,
                **slots,
            )
            leg = s.work("In {hours} hours, that is {eq} {unit}.", speed, "*", hours, hours=hours, **slots)
            left -= 1
            if first:
                total = leg
                continue
        else:
            leg = s.number(5, 80)
            s.say(
                "After that <come|came> another {n} {unit}.",
                "Then {n} more {unit} <follow|followed>.",
                "The last part <is|was> {n} {unit} long.",
                "{n} {unit} of bad road <come|came> next.",
                n=leg,
                **slots,
            )
        assert total is not None
        total = s.work("So far, that is {eq} {unit}.", total, "+", leg, **slots)
        left -= 1
    assert total is not None
    s.ask(
        "How many {unit} is that [in all|altogether|in total]?",
        "How far is that, in {unit}?",
        "How long is the [trip|way], in {unit}?",
        "What is the [total|whole] distance, in {unit}?",
        "What distance has been covered, in {unit}?",
        **slots,
    )


def distance_left(s: Story, steps: int) -> None:
    """A long way, some of it done."""
    s.person()
    unit = s.rng.choice(("miles", "kilometers"))
    speed, hours = s.number(4, 70), s.few(8)
    rest = s.number(5, 200)
    whole: Number = speed * hours + rest
    slots = {"unit": unit, "speed": speed, "hours": hours}
    s.say(
        "{who} <wants|wanted> to travel {n} {unit}.",
        "The [trip|route|road] <is|was> {n} {unit} long.",
        "A race <is|was> {n} {unit} long.",
        "{n} {unit} <lie|lay> before {who}.",
        n=whole,
        **slots,
    )
    s.say(
        "{He} <covers|covered> {speed} {unit} [an|per|every] hour for {hours} hours.",
        "For {hours} hours, {he} <does|did> {speed} {unit} an hour.",
        "In each of {hours} hours, {he} <goes|went> {speed} {unit}.",
        "{hours} hours at {speed} {unit} an hour <are|were> done.",
        He=s.slots["he"].capitalize(),
        **slots,
    )
    done = s.work("{who} has gone {eq} {unit}.", speed, "*", hours, **slots)
    if steps == 4 or (steps == 3 and s.chance(0.4)):
        more = s.number(2, max(2, rest - 1))
        s.say(
            "Then {he} <goes|went> {n} {unit} more.",
            "After lunch, {he} <does|did> another {n} {unit}.",
            n=more,
            **slots,
        )
        done = s.work("In all, {he} has gone {eq} {unit}.", done, "+", more, **slots)
    left = s.work("{eq} {unit} are left.", whole, "-", done, **slots)
    if steps == 2 or (steps == 3 and len(s.lines) == 3):
        s.ask(
            "How many {unit} are left?",
            "How far does {he} still have to go, in {unit}?",
            "How many {unit} remain?",
            "What distance is still ahead, in {unit}?",
            **slots,
        )
        return
    n = s.divisor(left)
    s.ask(
        "If {he} does the rest in {n} hours, how many {unit} is that per hour?",
        "The rest <is|was> to be done in {n} equal parts. How many {unit} is each?",
        "How many {unit} an hour must {he} go to finish in {n} hours?",
        "Split over {n} days, how many {unit} a day are left?",
        n=n,
        **slots,
    )
    s.work("That is {eq} {unit} each.", left, "/", n, **slots)


def reading(s: Story, steps: int) -> None:
    """Pages per day: of a book, of homework, of typing."""
    s.person()
    what, verb, done = s.rng.choice(
        (
            ("pages of a book", "<reads|read>", "read"),
            ("problems of homework", "<does|did>", "done"),
            ("words of an essay", "<writes|wrote>", "written"),
            ("rows of a scarf", "<knits|knitted>", "knitted"),
            ("exercises", "<does|did>", "done"),
            ("pieces of a puzzle", "<places|placed>", "placed"),
            ("letters", "<writes|wrote>", "written"),
            ("cards", "<makes|made>", "made"),
        )
    )
    unit = what.split(" ")[0]
    each, days = s.number(3, 40), s.few(14)
    slots = {"what": what, "unit": unit, "verb": verb, "each": each, "days": days, "done": done}
    kind = s.rng.choice(("total", "left", "days")) if steps >= 2 else s.rng.choice(("total", "days1"))
    if kind == "days1":
        s.say(
            "{who} <has|had> {n} {what} to finish.",
            "There <are|were> {n} {what} to be {done}.",
            "{who} <needs|needed> to finish {n} {what}.",
            "{n} {what} <wait|waited> for {who}.",
            n=each * days,
            **slots,
        )
        s.ask(
            "At {each} a day, how many days does it take?",
            "If {who} finishes {each} a day, how many days does {he} need?",
            "How many days does {who} need at {each} per day?",
            "In how many days are they {done} at {each} a day?",
            **slots,
        )
        s.work("It takes {eq} days.", each * days, "/", each)
        return
    left = steps
    if kind == "total":
        s.say(
            "{who} {v} {each} {what} [a|every|each] day for {days} days.",
            "Every day for {days} days, {who} {v} {each} {what}.",
            "On each of {days} days, {who} {v} {each} {what}.",
            "{who} {v} {each} {what} daily, {days} days long.",
            v=s.fill(verb, {}, s.shown),
            **slots,
        )
        total = s.work("That is {eq} {unit}.", each, "*", days, **slots)
        left -= 1
        if left >= 2 and s.chance(0.6):
            m, k = s.number(3, 40), s.few(9)
            s.say(
                "For the next {k} days it <is|was> {m} a day.",
                "Then {he} {v} {m} a day for {k} days.",
                "After that, {k} days with {m} each <follow|followed>.",
                "{k} more days <bring|brought> {m} each.",
                m=m,
                k=k,
                v=s.fill(verb, {}, s.shown),
            )
            more = s.work("The next {k} days make {eq} {unit}.", m, "*", k, k=k, **slots)
            total = s.work("In all, that is {eq} {unit}.", total, "+", more, **slots)
            left -= 2
        while left:
            n = s.number(2, 50)
            s.say(
                "On the last day {he} {v} {n} more.",
                "Then {he} {v} another {n}.",
                "{n} more <are|were> {done} at the weekend.",
                "A rainy day <brings|brought> {n} more.",
                n=n,
                v=s.fill(verb, {}, s.shown),
                **slots,
            )
            total = s.work("That makes {eq} {unit}.", total, "+", n, **slots)
            left -= 1
        s.ask(
            "How many {unit} is that [in all|altogether|]?",
            "How many {unit} are {done} [in all|in total]?",
            "How many {unit} has {who} {done}?",
            "What is the total number of {unit}?",
            **slots,
        )
        return
    k = s.few(10)
    rest = each * k
    start = s.number(3, 40)
    whole = rest + start * days
    s.say(
        "{who} <has|had> {n} {what} to finish.",
        "There <are|were> {n} {what} in all.",
        "{who} <starts|started> on {n} {what}.",
        "{n} {what} <are|were> to be {done} by {who}.",
        n=whole,
        **slots,
    )
    if left >= 2 and (kind == "left" or left >= 3):
        s.say(
            "{He} {v} {m} [a|each] day for {days} days.",
            "In the first {days} days, {he} {v} {m} a day.",
            "On each of {days} days, {m} <are|were> {done}.",
            "{days} days <go|went> by with {m} a day.",
            m=start,
            v=s.fill(verb, {}, s.shown),
            He=s.slots["he"].capitalize(),
            **slots,
        )
        gone = s.work("{eq} {unit} are {done}.", start, "*", days, **slots)
        value = s.work("{eq} {unit} are left.", whole, "-", gone, **slots)
        left -= 2
    else:
        s.say(
            "{He} {v} {m} on the first day.",
            "{m} <are|were> {done} already.",
            "On {day}, {he} {v} {m}.",
            "{m} of them <are|were> quickly {done}.",
            m=start * days,
            v=s.fill(verb, {}, s.shown),
            day=s.pick(words.DAYS),
            He=s.slots["he"].capitalize(),
            **slots,
        )
        value = s.work("{eq} {unit} are left.", whole, "-", start * days, **slots)
        left -= 1
    if not left:
        s.ask(
            "How many {unit} are left?",
            "How many {unit} [remain|are still to be {done}]?",
            "How many {unit} does {he} still have?",
            "What number of {unit} is left?",
            **slots,
        )
        return
    s.ask(
        "At {each} a day, how many [more|] days does {he} need [for the rest|]?",
        "If {he} does {each} a day from then on, how many days does the rest take?",
        "How many days does the rest take at {each} a day?",
        "With {each} a day, in how many days is the rest {done}?",
        **slots,
    )
    value = s.work("The rest takes {eq} days.", value, "/", each)
    if left == 2:
        extra = s.rng.randint(2, 9)
        s.question = s.question.rstrip("?") + f", if {extra} days without work come in between?"
        s.work("With the days off, that is {eq} days.", value, "+", extra)


def output(s: Story, steps: int) -> None:
    """Machines and workers that make things; some are faulty, some sold in boxes."""
    s.person()
    things = s.pick(words.MADE)
    maker = s.rng.choice(("machine", "worker", "factory", "workshop", "robot", "team"))
    each, hours, makers = s.number(3, 60), s.few(10), s.rng.randint(2, 8)
    slots = {"things": things, "maker": maker, "makers": words.plural(maker), "each": each, "hours": hours, "n": makers}
    left = steps
    several = left >= 2 and s.chance(0.5)
    unit = s.rng.choice(("hour", "day", "week"))
    if several:
        s.say(
            "A {maker} <makes|made> {each} {things} per {unit}. There <are|were> {n} {makers}.",
            "{n} {makers} <make|made> {each} {things} each per {unit}.",
            "Each of {n} {makers} <produces|produced> {each} {things} every {unit}.",
            "Every {unit}, {each} {things} <come|came> from each of {n} {makers}.",
            unit=unit,
            **slots,
        )
        rate = s.work("In one {unit}, they make {eq} {things}.", makers, "*", each, unit=unit, **slots)
        left -= 1
    else:
        s.say(
            "A {maker} <makes|made> {each} {things} [every|per|each] {unit}.",
            "{who}'s {maker} <produces|produced> {each} {things} every {unit}.",
            "In one {unit}, a {maker} <turns|turned> out {each} {things}.",
            "{each} {things} per {unit} <leave|left> a {maker}.",
            unit=unit,
            **slots,
        )
        rate = each
    s.say(
        "They <work|worked> for {hours} {unit}s." if several else "It <works|worked> for {hours} {unit}s.",
        "This <goes|went> on for {hours} {unit}s.",
        "{hours} {unit}s of work <are|were> planned.",
        "That <lasts|lasted> {hours} {unit}s.",
        unit=unit,
        **slots,
    )
    total = s.work("In {hours} {unit}s, that is {eq} {things}.", rate, "*", hours, unit=unit, **slots)
    left -= 1
    if left >= 2 or (left and s.chance(0.5)):
        bad = s.number(2, max(2, int(total) // 4))
        s.say(
            "{bad} of them <are|were> [broken|faulty|thrown away|kept].",
            "{bad} {things} <do|did> not pass the check.",
            "{bad} of the {things} <have|had> to be thrown away.",
            "{bad} <turn|turned> out badly.",
            bad=bad,
            **slots,
        )
        total = s.work("{eq} {things} are good.", total, "-", bad, **slots)
        left -= 1
    if left:
        size = s.divisor(total)
        s.ask(
            "They are packed in boxes of {k}. How many boxes is that?",
            "How many boxes of {k} do they fill?",
            "If {k} fit in a box, how many boxes are needed?",
            "How many boxes are filled with {k} each?",
            k=size,
        )
        total = s.work("They fill {eq} boxes.", total, "/", size)
        left -= 1
        if left:
            n = s.number(2, 30)
            s.question = ""
            s.say("They are packed in boxes of {k}.", "{k} of them <go|went> into a box.", k=size)
            s.ask(
                "If a box is sold for {m}, how much [money|] do the boxes bring?",
                "How much money is that at {m} a box?",
                "Each box costs {m}. What do all of them cost?",
                "What do they bring at {m} a box?",
                m=s.dollars(n),
            )
            s.work("They bring {eq} dollars.", total, "*", n)
        return
    good = "good" if s.lines[-1].endswith("good.") else ""
    s.ask(
        "How many {good} {things} is that [in all|altogether|]?",
        "How many {good} {things} are there [in the end|]?",
        "How many {good} {things} do they get?",
        "What is the number of {good} {things} in the end?",
        good=good,
        **slots,
    )


def using_up(s: Story, steps: int) -> None:
    """Food, fuel or paper that is used day by day."""
    s.person()
    users, unit = s.rng.choice(
        (
            ("dogs", "cups of food"),
            ("cats", "cans of food"),
            ("horses", "kilograms of hay"),
            ("people", "liters of water"),
            ("printers", "sheets of paper"),
            ("chickens", "grams of grain"),
            ("campers", "slices of bread"),
            ("stoves", "logs of wood"),
            ("lamps", "units of power"),
            ("students", "sheets of paper"),
        )
    )
    count, each, days = s.rng.randint(2, 9), s.rng.randint(2, 9), s.few(12)
    short = unit.split(" ")[0]
    slots = {"users": users, "unit": unit, "short": short, "count": count, "each": each, "days": days}
    s.say(
        "{who} <has|had> {count} {users}. Each of them <uses|used> {each} {unit} a day.",
        "{count} {users} <need|needed> {each} {unit} each per day.",
        "Every day, each of {count} {users} <takes|took> {each} {unit}.",
        "{each} {unit} a day <go|went> to each of {count} {users}.",
        **slots,
    )
    per_day = s.work("Each day, that is {eq} {short}.", count, "*", each, **slots)
    if steps == 1:
        s.ask(
            "How many {unit} is that per day?",
            "How many {unit} do they need each day?",
            "How much do they use a day, in {short}?",
            "What do they need daily, in {short}?",
            **slots,
        )
        return
    if s.chance(0.5):
        total = s.work("In {days} days, that is {eq} {short}.", per_day, "*", days, **slots)
        if steps == 2:
            s.ask(
                "How many {unit} do they need for {days} days?",
                "How many {unit} is that in {days} days?",
                "How much do they use in {days} days, in {short}?",
                "What is needed for {days} days, in {short}?",
                **slots,
            )
            return
        stock = int(total) + s.number(2, 80)
        s.say(
            "There <are|were> {n} {unit} in store.",
            "{who} <buys|bought> {n} {unit}.",
            "The store <holds|held> {n} {unit}.",
            "{n} {unit} <are|were> at hand.",
            n=stock,
            **slots,
        )
        rest = s.work("{eq} {short} are left.", stock, "-", total, **slots)
        if steps == 3:
            s.ask(
                "How many {unit} are left after {days} days?",
                "How many {short} remain after {days} days?",
                "After {days} days, how much is left, in {short}?",
                "What is left after {days} days, in {short}?",
                **slots,
            )
            return
        more = s.number(2, 60)
        s.say(
            "After {days} days, {n} more {short} <come|came>.",
            "Then {n} {short} <are|were> added after {days} days.",
            n=more,
            **slots,
        )
        s.ask(
            "How many {short} are there then?",
            "How many {unit} are there in the end?",
            "How much is there then, in {short}?",
            "What does that make, in {short}?",
            **slots,
        )
        s.work("Then there are {eq} {short}.", rest, "+", more, **slots)
        return
    stock = int(per_day) * days
    have: Number = stock
    if steps >= 3:
        part = s.number(1, stock - 1)
        s.say(
            "There <are|were> {a} {unit} in one store and {b} in another.",
            "{who} <has|had> {a} {unit} and <buys|bought> {b} more.",
            "To {a} {unit}, {who} <adds|added> {b}.",
            "{a} {unit} <are|were> there and {b} more <come|came>.",
            a=part,
            b=stock - part,
            **slots,
        )
        have = s.work("There are {eq} {short}.", part, "+", stock - part, **slots)
    else:
        s.say(
            "There <are|were> {n} {unit}.",
            "{who} <has|had> {n} {unit} in store.",
            "{who} <buys|bought> {n} {unit}.",
            "{n} {unit} <are|were> at hand.",
            n=stock,
            **slots,
        )
    s.ask(
        "How many days does that last?",
        "For how many days is that enough?",
        "After how many days is it used up?",
        "How many days can they live on it?",
        **slots,
    )
    s.work("It lasts {eq} days.", have, "/", per_day)


SITUATIONS = [
    Situation(travel, range(1, 6), 1.5),
    Situation(distance_left, range(2, 5), 0.8),
    Situation(reading, range(1, 6), 2.0),
    Situation(output, range(1, 6), 1.5),
    Situation(using_up, range(1, 5), 1.2),
]
