"""Buying, saving, earning, discounts, profit and shared bills."""

from __future__ import annotations

from decimal import Decimal

from word_problems import words
from word_problems.story import Number, Reject, Situation, Story


def price(s: Story, low: int = 2, high: int = 20) -> Number:
    """Mostly whole dollars."""
    if s.chance(0.12):
        return s.rng.randint(low, high) + Decimal(s.rng.choice(("0.5", "0.25", "0.75", "0.5")))
    return s.number(low, high)


def shopping(s: Story, steps: int) -> None:
    """Several of one thing, or of two and three: what it costs, what is left, what each pays."""
    s.person()
    s.person("other")
    left = steps
    end = s.rng.choice(("", "change", "change", "share", "enough")) if left >= 2 else ""
    left -= bool(end)
    names = s.some((*words.GOODS, *words.CHEAP), 3)
    place = s.rng.choice(("store", "market", "shop", "mall", "fair", "bakery"))
    total: Number | None = None
    bought = 0
    while left and bought < 3:
        thing = names[bought]
        many = left >= (1 if total is None else 2) and (total is None or s.chance(0.7))
        if total is None and left >= 2 and s.chance(0.3):
            many = False
        each = price(s)
        if many:
            count = s.few(10)
            slots = {
                "n": count,
                "things": words.plural(thing),
                "thing": thing,
                "price": s.dollars(each),
                "place": place,
            }
            s.say(
                *(
                    (
                        "{who} <buys|bought> {n} {things} [at the {place}|] for {price} each.",
                        "{who} <buys|bought> {n} {things}. Each {thing} <costs|cost> {price}.",
                        "{who} <goes|went> to the {place} and <buys|bought> {n} {things} at {price} [each|apiece].",
                        "A {thing} <costs|cost> {price}. {who} <buys|bought> {n} [of them|{things}].",
                        "{who} <needs|needed> {n} {things} that <cost|cost> {price} each.",
                    )
                    if total is None
                    else (
                        "{He} also <buys|bought> {n} {things} for {price} each.",
                        "{He} <takes|took> {n} {things} at {price} each as well.",
                        "{n} {things} at {price} each <go|went> into the cart too.",
                        "{n} {things} for {price} each <are|were> added.",
                    )
                ),
                **slots,
                He=s.slots["he"].capitalize(),
            )
            cost: Number = s.work(
                ["The {things} cost {eq} dollars.", "{n} {things} cost {eq} dollars."], count, "*", each, **slots
            )
            left -= 1
        else:
            slots = {"thing": words.article(thing), "price": s.dollars(each)}
            s.say(
                *(
                    (
                        "{who} <buys|bought> {thing} for {price}.",
                        "{who} <pays|paid> {price} for {thing}.",
                        "{who} <spends|spent> {price} on {thing}.",
                        "{price} <is|was> what {who} <pays|paid> for {thing}.",
                    )
                    if total is None
                    else (
                        "{He} also <buys|bought> {thing} for {price}.",
                        "{He} <spends|spent> another {price} on {thing}.",
                        "Then {he} <gets|got> {thing} for {price}.",
                        "With it <comes|came> {thing} for {price}.",
                    )
                ),
                **slots,
                He=s.slots["he"].capitalize(),
            )
            cost = each
        if total is None:
            total = cost
        else:
            if not left:
                raise Reject
            total = s.work(["In all, that is {eq} dollars.", "The total is {eq} dollars."], total, "+", cost)
            left -= 1
        bought += 1
    if left or total is None:
        raise Reject
    s.distract()
    if not end:
        s.ask(
            "How much [does|did] {who} [pay|spend] [in total|altogether|in all|]?",
            "How much [is that|does it cost] [in total|altogether|in all]?",
            "What is the total cost?",
            "What does {who} have to pay?",
            "How many dollars does {he} spend?",
        )
    elif end == "change":
        note = next((n for n in (10, 20, 50, 100, 200, 500) if n > total), None) if s.chance(0.6) else None
        paid = note or int(total) + s.number(2, 40)
        s.ask(
            "{who} <pays|paid> with {n}. How much change does {he} get [back|]?",
            "If {he} <has|had> {n}, how much [money|] is left?",
            "How much of {his} {n} does {he} have left?",
            "{He} <has|had> {n} [in {his} wallet|]. How much money does {he} have left [after that|]?",
            "What change does {who} get from {n}?",
            n=s.dollars(paid),
            He=s.slots["he"].capitalize(),
        )
        s.work(["{who} has {eq} dollars left.", "The change is {eq} dollars."], paid, "-", total)
    elif end == "share":
        n = s.rng.randint(2, 6)
        if (Decimal(total) * 100) % n:
            raise Reject
        s.ask(
            "{who} and {his} friends, {n} people in all, share the cost equally. How much does each pay?",
            "If {n} people split the cost evenly, how much does each [of them|] pay?",
            "How much does each pay if {n} people share the bill equally?",
            "Divided equally by {n} people, what is each one's part?",
            n=n,
        )
        s.work("Each pays {eq} dollars.", Decimal(total) if total % n else total, "/", n)
    else:
        lacking = s.number(2, 20)
        has = int(total) - lacking
        if has <= 1:
            raise Reject
        s.ask(
            "{who} only <has|had> {n}. How much more [money|] does {he} need?",
            "If {who} <has|had> only {n}, how many dollars are missing?",
            "How much more does {he} need if {he} <has|had> {n}?",
            "How much must {other} lend {him} if {he} <has|had> {n}?",
            n=s.dollars(has),
        )
        s.work("{who} needs {eq} dollars more.", total, "-", has)


def saving(s: Story, steps: int) -> None:
    """Saving up for something: how long it takes or how much there is."""
    s.person()
    thing = s.pick(words.DEAR)
    period = s.rng.choice(("week", "month", "day"))
    each, count = s.number(3, 40), s.few(20)
    left = steps
    goal: Number = each * count
    slots = {"period": period, "each": s.dollars(each), "thing": thing, "a": words.article(thing)}
    if s.chance(0.5):  # how long
        have = s.number(5, 90) if left >= 2 else 0
        extra = s.number(5, 60) if left >= 3 else 0
        goal = goal + have + extra
        s.say(
            "{who} <wants|wanted> to buy {a} that <costs|cost> {n}.",
            "{A} <costs|cost> {n}, and {who} <wants|wanted> one.",
            "{who} <saves|was saving> for {a} that <costs|cost> {n}.",
            "The price of the {thing} that {who} <dreams|dreamed> of <is|was> {n}.",
            n=s.dollars(goal),
            A=slots["a"].capitalize(),
            **slots,
        )
        if have:
            s.say(
                "{He} already <has|had> {n}.",
                "So far {he} <has|had> {n}.",
                "{He} <has|had> saved {n}.",
                "{n} <are|were> in {his} piggy bank.",
                n=s.dollars(have),
                He=s.slots["he"].capitalize(),
            )
            goal = s.work("{who} still needs {eq} dollars.", goal, "-", have)
            left -= 1
        if extra:
            s.say(
                "{His} {kin} <gives|gave> {him} {n} [for it|].",
                "{He} <gets|got> {n} as a present.",
                "For {his} birthday {he} <gets|got> {n}.",
                "{n} <come|came> from {his} {kin}.",
                n=s.dollars(extra),
                kin=s.pick(words.RELATIVES),
                His=s.slots["his"].capitalize(),
                He=s.slots["he"].capitalize(),
            )
            goal = s.work("After the gift, {he} needs {eq} dollars.", goal, "-", extra)
            left -= 1
        if left == 2:
            spend = s.number(2, each + 20)
            s.say(
                "{He} <earns|earned> {n} a {period}, but <spends|spent> {m} of it.",
                "Each {period}, {he} <gets|got> {n} and <spends|spent> {m} of it.",
                "{He} <makes|made> {n} every {period} and <needs|needed> {m} of that for food.",
                "From {n} a {period}, {m} <go|went> for rent.",
                n=s.dollars(each + spend),
                m=s.dollars(spend),
                He=s.slots["he"].capitalize(),
                **slots,
            )
            s.work("{who} saves {eq} dollars a {period}.", each + spend, "-", spend, **slots)
        elif left == 1:
            s.say(
                "{He} <saves|saved> {each} [a|every|each] {period}.",
                "{He} <can|could> save {each} a {period}.",
                "Every {period} {he} <puts|put> aside {each}.",
                "{each} a {period} <is|was> what {he} <can|could> save.",
                He=s.slots["he"].capitalize(),
                **slots,
            )
        else:
            raise Reject
        s.ask(
            "How many {period}s [will|does] it take [{him}|] to [have enough|save enough|get it]?",
            "[After|In] how many {period}s can {he} buy it?",
            "For how many {period}s does {he} have to save?",
            "How many {period}s must pass until {he} can pay for it?",
            **slots,
        )
        s.work("It takes {eq} {period}s.", goal, "/", each, **slots)
        return
    s.say(
        "{who} <saves|saved> {each} [a|every|each] {period} for {n} {period}s.",
        "For {n} {period}s, {who} <puts|put> {each} a {period} in a jar.",
        "{who} <earns|earned> {each} a {period} and <does|did> so for {n} {period}s.",
        "Over {n} {period}s, {who} <sets|set> aside {each} a {period}.",
        n=count,
        **slots,
    )
    total = s.work("That is {eq} dollars.", each, "*", count)
    left -= 1
    while left:
        gain = s.chance(0.4)
        n = s.number(2, 60)
        if gain:
            s.say(
                "{He} also <gets|got> {n} from {his} {kin}.",
                "{His} {kin} <adds|added> {n}.",
                "Then {he} <earns|earned> {n} more.",
                "{n} <come|came> on top.",
                n=s.dollars(n),
                kin=s.pick(words.RELATIVES),
                His=s.slots["his"].capitalize(),
                He=s.slots["he"].capitalize(),
            )
        else:
            s.say(
                "{He} <spends|spent> {n} of it on {a}.",
                "Then {he} <buys|bought> {a} for {n}.",
                "{n} of it <go|went> for {a}.",
                "{He} <pays|paid> {n} for {a} from it.",
                n=s.dollars(n),
                a=words.article(s.pick(words.GOODS)),
                He=s.slots["he"].capitalize(),
            )
        total = s.work("{who} has {eq} dollars then.", total, "+" if gain else "-", n)
        left -= 1
    s.ask(
        "How much [money|] does {who} have [now|in the end|]?",
        "How many dollars does {he} have [now|then]?",
        "How much is there in the end?",
        "What sum does {who} have in the end?",
    )


def wages(s: Story, steps: int) -> None:
    """Pay by the hour, over days and weeks, with extras and costs."""
    s.person()
    job = s.pick(words.WORKERS)
    rate, hours, days, weeks = s.number(6, 40), s.few(10), s.rng.randint(2, 7), s.few(8)
    slots = {"job": words.article(job), "rate": s.dollars(rate), "hours": hours, "days": days, "weeks": weeks}
    left = steps
    depth = s.rng.randint(1, min(3, left))
    s.say(
        "{who} <works|worked> as {job} and <earns|earned> {rate} an hour.",
        "{who} <makes|made> {rate} per hour as {job}.",
        "As {job}, {who} <gets|got> {rate} [an|per] hour.",
        "{job} named {who} <is|was> paid {rate} an hour.",
        "{rate} an hour <is|was> {who}'s pay as {job}.",
        **slots,
    )
    if depth == 1:
        s.say(
            "{He} <works|worked> {hours} hours.",
            "{He} <is|was> paid for {hours} hours.",
            "{His} shift <lasts|lasted> {hours} hours.",
            "{hours} hours <are|were> on {his} sheet.",
            He=s.slots["he"].capitalize(),
            His=s.slots["his"].capitalize(),
            **slots,
        )
        total = s.work("{who} earns {eq} dollars.", rate, "*", hours)
    else:
        s.say(
            "{He} <works|worked> {hours} hours a day"
            + (", {days} days a week." if depth == 3 else " for {days} days."),
            "{He} <works|worked> {days} days a week, {hours} hours each day."
            if depth == 3
            else "{He} <works|worked> {hours} hours on each of {days} days.",
            He=s.slots["he"].capitalize(),
            **slots,
        )
        total = s.work("A day brings {eq} dollars.", rate, "*", hours)
        total = s.work("{days} days bring {eq} dollars.", total, "*", days, **slots)
        if depth == 3:
            s.say(
                "{He} <does|did> this for {weeks} weeks.",
                "This <goes|went> on for {weeks} weeks.",
                "The job <lasts|lasted> {weeks} weeks.",
                "{weeks} weeks <pass|passed> like this.",
                He=s.slots["he"].capitalize(),
                **slots,
            )
            total = s.work("{weeks} weeks bring {eq} dollars.", total, "*", weeks, **slots)
    left -= depth
    while left:
        gain = s.chance(0.45)
        n = s.number(5, 80)
        if gain:
            s.say(
                "{He} also <gets|got> {n} in tips.",
                "A bonus of {n} <is|was> added.",
                "There <is|was> a bonus of {n}.",
                "On top <come|came> {n} for travel.",
                n=s.dollars(n),
                He=s.slots["he"].capitalize(),
            )
        else:
            s.say(
                "{He} <pays|paid> {n} in taxes.",
                "{He} <spends|spent> {n} on [food|travel|tools].",
                "{n} <are|were> taken off for [tools|insurance|a uniform].",
                "{n} <go|went> for parking.",
                n=s.dollars(n),
                He=s.slots["he"].capitalize(),
            )
        total = s.work("That makes {eq} dollars." if gain else "{eq} dollars are left.", total, "+" if gain else "-", n)
        left -= 1
    s.ask(
        "How much [money|] does {who} [earn|make] [in all|in total|in the end|]?",
        "How many dollars is that [in all|in the end]?",
        "How much does {he} have in the end?",
        "What does {who} take home?",
    )


def discount(s: Story, steps: int) -> None:
    """A price, some percent off, perhaps several items, change or tax."""
    s.person()
    percent = s.rng.choice((5, 10, 10, 15, 20, 20, 25, 25, 30, 40, 50, 50, 60, 75))
    base = s.rng.randint(2, 30) * (100 // _common(100, percent))
    if base > 900 or base < 4:
        raise Reject
    thing = s.pick((*words.GOODS, *words.DEAR))
    up = s.chance(0.2)
    total: Number = base
    left = steps
    slots = {"thing": thing, "things": words.plural(thing), "p": percent, "a": words.article(thing)}
    if left >= 3 and s.chance(0.5):
        count = s.few(6)
        s.say(
            "{who} <buys|bought> {count} {things} for {n} each.",
            "{count} {things} <cost|cost> {n} each.",
            "{who} <takes|took> {count} {things} at {n} each.",
            "One {thing} <costs|cost> {n}; {who} <wants|wanted> {count}.",
            n=s.dollars(base),
            count=count,
            **slots,
        )
        total = s.work("At first, that is {eq} dollars.", count, "*", base)
        left -= 1
    else:
        s.say(
            "{who} <buys|bought> {a} that [normally|usually] <costs|cost> {n}.",
            "The price of {a} <is|was> {n}.",
            "{a} <costs|cost> {n}.",
            "{who} <sees|saw> {a} for {n}.",
            n=s.dollars(base),
            **slots,
        )
    if up:
        s.say(
            "Then the price <goes|went> up by {p}%.",
            "There <is|was> a {p}% tax on it.",
            "A tip of {p}% <is|was> added.",
            "To this <come|came> {p}% for delivery.",
            **slots,
        )
    else:
        s.say(
            "There <is|was> a {p}% discount.",
            "It <is|was> on sale for {p}% off.",
            "{who} <has|had> a coupon for {p}% off.",
            "The shop <takes|took> {p} percent off.",
            "The price <is|was> reduced by {p}%.",
            **slots,
        )
    part = _percent(s, total, percent)
    left -= 1
    if not left:
        s.ask(
            "How much is [added|the increase], in dollars?" if up else "How much [money|] does {who} save?",
            "What is {p}% of the price, in dollars?",
            "How many dollars is that?",
            "By how many dollars does the price change?",
            **slots,
        )
        return
    total = s.work("The new price is {eq} dollars.", total, "+" if up else "-", part)
    left -= 1
    if not left:
        s.ask(
            "How much does {who} pay?",
            "What is the [final|new] price?",
            "How much does it cost [now|in the end]?",
            "How many dollars are to be paid?",
        )
        return
    if left == 1:
        paid = int(total) + s.number(2, 60)
        s.ask(
            "If {who} pays with {n}, how much change does {he} get?",
            "{He} <has|had> {n}. How much is left after that?",
            "How much of {n} is left?",
            "What does {who} get back from {n}?",
            n=s.dollars(paid),
            He=s.slots["he"].capitalize(),
        )
        s.work("{who} has {eq} dollars left.", paid, "-", total)
        return
    raise Reject


def _common(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def _percent(s: Story, total: Number, percent: int) -> Number:
    """One step: a percentage as the nearest simple operation."""
    for share, divisor in ((50, 2), (25, 4), (20, 5), (10, 10)):
        if percent == share and total % divisor == 0:
            return s.work("{p}% of {n} is {eq}.", total, "/", divisor, p=percent, n=total)
    value = Decimal(percent) / 100
    return s.work("{p}% of {n} is {eq}.", total, "*", value.normalize(), p=percent, n=total)


def profit(s: Story, steps: int) -> None:
    """Buying or making, and selling."""
    s.person()
    thing = s.pick((*words.GOODS, *words.CHEAP))
    things = words.plural(thing)
    cost, count = s.number(2, 20), s.few(30)
    gain = s.rng.randint(1, 20)
    slots = {"things": things, "thing": thing, "n": count, "cost": s.dollars(cost), "sold": s.dollars(cost + gain)}
    if steps == 2:
        s.say(
            "{who} <buys|bought> {n} {things} for {cost} each and <sells|sold> them for {sold} each.",
            "{who} <sells|sold> {n} {things} at {sold} each that <cost|had cost> {him} {cost} each.",
            "A {thing} <costs|cost> {who} {cost} to make, and {he} <sells|sold> {n} of them for {sold} each.",
            "For {sold} each, {who} <sells|sold> {n} {things} that {he} <gets|got> for {cost} each.",
            **slots,
        )
        each = s.work("{who} earns {eq} dollars on each {thing}.", cost + gain, "-", cost, **slots)
        s.ask(
            "How much [profit|money] does {who} make [in total|]?",
            "What is {his} [profit|total profit]?",
            "How much profit is that?",
            "How many dollars does {he} gain?",
        )
        s.work("The profit is {eq} dollars.", each, "*", count)
        return
    s.say(
        "{who} <sells|sold> {n} {things} for {sold} each.",
        "{who} <makes|made> {n} {things} and <sells|sold> them at {sold} each.",
        "At a fair, {who} <sells|sold> {n} {things} for {sold} each.",
        "{n} {things} at {sold} each <leave|left> {who}'s stall.",
        **slots,
    )
    total = s.work("The sales bring {eq} dollars.", count, "*", cost + gain)
    left = steps - 1
    if left >= 2 and s.chance(0.5):
        m, p = s.few(), s.number(2, 10)
        s.say(
            "{He} also <sells|sold> {m} [cakes|drinks|cards] for {p} each.",
            "{m} cups of tea <are|were> sold at {p} each.",
            "Then {he} <sells|sold> {m} pies for {p} each.",
            "{m} plants for {p} each <are|were> sold too.",
            m=m,
            p=s.dollars(p),
            He=s.slots["he"].capitalize(),
        )
        extra = s.work("That brings {eq} dollars more.", m, "*", p)
        total = s.work("Together, that is {eq} dollars.", total, "+", extra)
        left -= 2
    while left:
        n = s.number(2, max(3, int(total) // (left + 1)))
        s.say(
            "{He} <pays|paid> {n} for the [stall|materials|table].",
            "The [materials|ingredients] <cost|cost> {n}.",
            "{He} <spends|spent> {n} on [materials|the stall].",
            "{n} <go|went> for the stand.",
            n=s.dollars(n),
            He=s.slots["he"].capitalize(),
        )
        total = s.work("{eq} dollars remain.", total, "-", n)
        left -= 1
    s.ask(
        "How much [profit|money] does {who} make?",
        "What is {his} profit?",
        "How much [profit is that|is left]?",
        "How many dollars does {he} keep?",
    )


def tickets(s: Story, steps: int) -> None:
    """Prices for adults and children."""
    s.person()
    a, b = s.number(5, 30), s.number(2, 12)
    m, n = s.few(9), s.few(12)
    place = s.rng.choice(("museum", "zoo", "cinema", "circus", "swimming pool", "concert", "boat ride", "theater"))
    s.say(
        "A ticket for the {place} <costs|cost> {a} for an adult and {b} for a child.",
        "Adults <pay|paid> {a} and children {b} at the {place}.",
        "Tickets for the {place} <are|were> {a} for adults and {b} for children.",
        "At the {place}, {a} <is|was> the price for adults and {b} for children.",
        place=place,
        a=s.dollars(a),
        b=s.dollars(b),
    )
    s.say(
        "A group of {m} adults and {n} children <goes|went> there.",
        "{m} adults and {n} children <buy|bought> tickets.",
        "{who}'s family <has|had> {m} adults and {n} children.",
        "{who} <takes|took> {m} adults and {n} children along.",
        m=m,
        n=n,
    )
    one = s.work("The adults pay {eq} dollars.", m, "*", a)
    two = s.work("The children pay {eq} dollars.", n, "*", b)
    total = s.work("Together, they pay {eq} dollars.", one, "+", two)
    left = steps - 3
    if left == 2:
        off = s.number(2, min(20, int(total) - 1))
        s.say(
            "The group <gets|got> {n} off.",
            "A coupon <takes|took> {n} off.",
            "There <is|was> a discount of {n}.",
            "{n} <are|were> taken off.",
            n=s.dollars(off),
        )
        total = s.work("After that, they pay {eq} dollars.", total, "-", off)
        left -= 1
    if left:
        paid = int(total) + s.number(2, 40)
        s.ask(
            "They <pay|paid> with {n}. How much change do they get?",
            "How much is left of {n}?",
            "If they have {n}, how much is left?",
            "What do they get back from {n}?",
            n=s.dollars(paid),
        )
        s.work("{eq} dollars are left.", paid, "-", total)
        return
    s.ask(
        "How much do they pay [in total|altogether]?",
        "How much do all tickets cost?",
        "What is the total cost?",
        "How many dollars do they pay?",
    )


SITUATIONS = [
    Situation(shopping, range(1, 6), 4.0),
    Situation(saving, range(1, 5), 1.5),
    Situation(wages, range(1, 6), 1.5),
    Situation(discount, range(1, 5), 1.5),
    Situation(profit, range(2, 6), 1.2),
    Situation(tickets, range(3, 6), 0.8),
]
