"""Everyday stories told in one breath: the numbers stand in the order of the telling, and a clause with "if", "but" or
"the rest" says which operations they need.

A tale is a formula, whole texts and one line of work for each operation. For training only: the held-out problems are
older than these.
"""

# ruff: noqa: E501 (whole texts stand on one line each)

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from word_problems import words
from word_problems.story import Number, Reject, Situation, Story


@dataclass(frozen=True)
class Tale:
    """Texts of one meaning.

    Attributes:
        formula: of numbers a, b, c, d: ``a - b / c`` is (a - b) / c, from left to right; ``;`` starts a second
            product, which is added.
        texts: whole problems.
        work: a line for each operation.
        slots: what may fill slots: a choice for a slot, or tuples of choices for slots whose names are joined by
            spaces.
    """

    formula: str
    texts: tuple[str, ...]
    work: tuple[str, ...]
    slots: Mapping[str, Sequence[object]] = field(default_factory=dict)

    @property
    def operations(self) -> int:
        return len(self.work)


TALES = (
    # (a - b) / c: the rest in groups
    Tale(
        "a - b / c",
        (
            "{who} had {a} {things}. {he} [gave away|sold|lost] {b} [of them|] and put the rest into {boxes}, {c} in each {box}. How many {boxes} did {he} [need|use|fill]?",
            "{who} [bought|collected|picked|made] {a} {things}, but {b} of them were [broken|bad|too small]. If the others fit into {boxes} with {c} in each [{box}|], how many {boxes} [are|were] filled?",
            "A shop had {a} {things}. It sold {b} on {day} and packed what was left into {boxes} of {c}. How many {boxes} did that take?",
            "Out of {a} {things}, {who} kept {b}. [The remaining ones|The rest] went into {boxes} that hold {c} {things} each. How many {boxes} [did {he} need|were needed]?",
            "{who} [started|began] with {a} {things} and used {b}. If {he} [then|] put [the rest|the ones that were left] in {boxes} of {c}, how many {boxes} would {he} have?",
            "{who} [made|bought] {a} {things} for a party. {his} {kin} took {b} of them [before it began|]. How many {boxes} can {who} [fill|make] if {he} puts {c} {things} in each [{box}|]?",
            "[After {b} of {his} {a} {things} were given away|After giving away {b} of {a} {things}], {who} sorted the rest into {boxes}. Each {box} got {c}. How many {boxes} were there?",
        ),
        ("There are {eq} {things} left.", "That makes {eq} {boxes}."),
        {"things": words.THINGS, "boxes box": words.HOLDING, "day": words.DAYS, "kin": words.RELATIVES},
    ),
    Tale(
        "a - b / c",
        (
            "{who} had {a} dollars. {he} spent {b} dollars on {dear}. How many {things} could {he} buy with the rest if each one costs {c} dollars?",
            "{who} saved ${a} and bought {dear} for ${b}. With the money that was left, how many {things} at ${c} each can {he} buy?",
            "{who} got {a} dollars [for {his} birthday|from {his} {kin}]. If {he} spent {b} of it on {dear}, how many {c} dollar {things} could {he} [buy|afford] with what was left?",
            "{who} earned {a} dollars {earning}, but {dear} cost {him} {b} dollars. How many {things} that cost {c} dollars each could {he} buy with the money {he} had left?",
        ),
        ("{who} has {eq} dollars left.", "{he} could buy {eq} {things}."),
        {
            "things": words.PRICED,
            "dear": [words.article(thing) for thing in words.DEAR],
            "kin": words.RELATIVES,
            "earning": words.EARNED,
        },
    ),
    Tale(
        "a - b / c",
        (
            "There were {a} {crowd} at the {place}. {b} [of them|] {gone}, and the others [stood|waited|lined up] in groups of {c}. How many groups were there?",
            "Of the {a} {crowd} at the {place}, {b} {gone}. The rest were in groups with {c} in each. How many groups [were there|was that]?",
            "{a} {crowd} were at the {place}. If {b} {gone} and there were {c} in every group that stayed, how many groups stayed?",
        ),
        ("{eq} {crowd} stayed.", "That is {eq} groups."),
        {"crowd place gone come": words.CROWDS},
    ),
    Tale(
        "a - b / c",
        (
            "{who} had {a} {things}. {he} put {b} of them in one {box} and [split|shared] the rest equally among {c} other {boxes}. How many {things} went into each of [these|the other] {boxes}?",
            "{who} [took|owned|had] {a} {things}. {b} went into a big {box}, and the rest into {c} small {boxes}, with the same number in each. How many {things} are in each small {box}?",
            "{who} kept {b} of {his} {a} {things} and divided the others equally among {c} friends. How many did each friend get?",
            "{who} had {a} {things} to give away. {his} {kin} got {b}, and {c} friends shared the rest equally. How many did each friend get?",
        ),
        ("{eq} {things} are left.", "Each gets {eq} {things}."),
        {"things": words.THINGS, "boxes box": words.HOLDING, "kin": words.RELATIVES},
    ),
    # (a - b) * c: what is still to be done, or what is still there
    Tale(
        "a - b * c",
        (
            "{who} has to {do} {a} {jobs}. {he} has already {done} {b} [of them|]. If each [one|] takes {c} {unit}, how [long|many {unit}] will it take {him} to {do} the rest?",
            "There were {a} {jobs} to be {done}, and {b} of them were {done} [already|yesterday|on {day}]. Each one takes {c} {unit}. How many {unit} will the rest take?",
            "{who} needs {c} {unit} to {do} one of {a} {jobs}. {b} are {done}. How many more {unit} does {he} need [to finish|for the others]?",
            "A crew had {a} {jobs} to {do} and had {done} {b}. If it takes {c} {unit} to {do} each, how long will the remaining ones take [them|]?",
        ),
        ("{eq} {jobs} are left.", "They take {eq} {unit}."),
        {"jobs do done": words.JOBS, "unit": ("minutes", "hours"), "day": words.DAYS},
    ),
    Tale(
        "a - b * c",
        (
            "{who} gets {c} dollars for each of the {jobs} {he} has {done}. {he} had {a} {jobs} to {do}, but forgot {b} [of them|]. How much [money|] did {he} [actually|] [earn|make]?",
            "{who} could have {done} {a} {jobs} for {c} dollars each, but {he} {skipped} {b} of them. How many dollars did {he} [earn|get]?",
            "{who} had {a} {jobs} to {do} at ${c} each. If {he} didn't {do} {b} of them, how much [money|] did {he} earn?",
        ),
        ("{he} has {done} {eq} {jobs}.", "{he} earned {eq} dollars."),
        {"jobs do done": words.JOBS, "skipped": ("left out", "skipped", "did not get to")},
    ),
    Tale(
        "a - b * c",
        (
            "{who} [bought|had|got] {a} {boxes} of {things} and gave {b} [of them|{boxes}] to {his} {kin}. If [each {box} has {c} {things} inside|there are {c} {things} in each {box}], how many {things} does {he} [still|] have [left|]?",
            "There were {a} {boxes} with {c} {things} each. {who} took {b} {boxes}. How many {things} are [left|in the other {boxes}]?",
            "{who} had {a} {boxes}, and {b} of them were empty. The others had {c} {things} each. How many {things} were there [in all|]?",
            "One {box} holds {c} {things}. {who} packed {a} of them and then sold {b}. How many {things} were in the {boxes} that were left?",
            "There are {c} {things} in a {box}. If {who} has {a} {boxes} and opens {b} of them, how many {things} are in the {boxes} that [are|stay] closed?",
        ),
        ("{eq} {boxes} are left.", "They hold {eq} {things}."),
        {"things": words.THINGS, "boxes box": words.HOLDING, "kin": words.RELATIVES},
    ),
    Tale(
        "a - b * c",
        (
            "{who} [bought|had] {a} tickets and after [the show|the rides|a day] {he} had {b} [tickets|of them|] left. If each ticket cost {c} dollars, how much did the tickets cost that {he} used?",
            "{who} wants {a} {things} but has only {b}. If one costs {c} dollars, how much [money|] does {he} need [to buy the rest|for the rest]?",
            "{who} needs {a} {things} and has {b} [of them|already]. At {c} dollars each, how many dollars will the missing ones cost?",
            "{who} needed {a} {things} in all, but only had {b}. Each [one|] costs ${c}. How much would [it cost {him}|{he} have to pay] to get the rest?",
        ),
        ("That is {eq} of them.", "They cost {eq} dollars."),
        {"things": words.PRICED},
    ),
    # (a + b) * c
    Tale(
        "a + b * c",
        (
            "In a game, each {one} is worth {c} points. If {who} {got} {a} {many} in the first {part} and {b} in the second [{part}|], how many points did {he} [get|score|have] [in all|]?",
            "{who} {got} {a} {many} in the first {part} and {b} {many} in the second {part}. Each {one} was worth {c} points. What was {his} [final|total] score?",
            "While playing [a game|with {his} {kin}], {who} {got} {a} {many}, and later {b} more. If every {one} gives {c} points, what would {his} score be?",
            "You get {c} points for every {one}. {who} {got} {a} {many} before lunch and {b} after [it|lunch]. How many points is that?",
        ),
        ("{who} {got} {eq} {many}.", "That is {eq} points."),
        {"one many got part": words.POINTS, "kin": words.RELATIVES},
    ),
    Tale(
        "a + b * c",
        (
            "{who} sold {a} {one} and {b} {two} at a [market|fair|yard sale]. If each cost {c} dollars, how much [money|] did {he} [earn|make|take in]?",
            "{who} bought {a} {one} and {b} {two}. [They were|Each was|All cost] {c} dollars each. How much did {he} [pay|spend] [in all|in total|]?",
            "Every {many} costs {c} dollars. How much are {a} {one} and {b} {two}?",
            "{who} spent {c} minutes on each piece when {he} put together {a} {one} and {b} {two}. How many minutes did it take {him} [in all|to finish|]?",
        ),
        ("There are {eq} pieces.", "That comes to {eq}."),
        {
            "one two many": tuple(
                (words.plural(one), words.plural(two), "piece")
                for one, two in zip(words.GOODS[:-4:2], words.GOODS[1:-4:2])
            )
        },
    ),
    Tale(
        "a + b * c",
        (
            "There were {c} {holders} with {a} {one} and {b} {two} for each [{holder}|]. How many {many} [were there|is that] [in all|in total|altogether|]?",
            "Each of {c} {holders} has {a} {one} and {b} {two}. How many {many} are there [altogether|in all]?",
            "{who} [counted|saw] {c} {holders}. If every {holder} had {a} {one} and {b} {two}, how many {many} did {he} [count|see] in total?",
            "One {holder} has {a} {one} and {b} {two}. How many {many} do {c} {holders} have?",
        ),
        ("Each {holder} has {eq} {many}.", "In all, that is {eq} {many}."),
        {"one two many holder holders": words.KINDS},
    ),
    # (a + b) / c
    Tale(
        "a + b / c",
        (
            "There are {a} {one} and {b} {two}. If each {holder} can hold {c} {many}, how many {holders} [are|will be|would be] needed?",
            "One {holder} holds {c} {many}. How many {holders} are needed for {a} {one} and {b} {two}?",
            "There are {a} {one} and {b} {two} in all. {c} {many} fit [in|on] one {holder}. How many {holders} will they need?",
            "{who} [saw|counted] {a} {one} and then {b} {two}. There were {c} {many} [to|for] each {holder}. How many {holders} were there?",
            "[{c} {many} share a {holder}|Every {holder} is for {c} {many}]. If {a} {one} and {b} {two} come, how many {holders} are there?",
        ),
        ("There are {eq} {many}.", "They need {eq} {holders}."),
        {"one two many holder holders": words.KINDS},
    ),
    Tale(
        "a + b / c",
        (
            "{who} made {a} dollars {earning} and {b} dollars {more}. If {he} only spent {c} dollars a week, how [long|many weeks] would the money last [{him}|]?",
            "{who} got {a} dollars from {his} {kin} and earned {b} dollars {earning}. {he} spends {c} dollars [each|every|a] week. How many weeks will [it|the money] last?",
            "{who} earned ${a} {earning} and ${b} {more}. How many {things} at ${c} each could {he} buy [with it|]?",
            "{who} won {a} points in one game and {b} in another. If {a_thing} costs {c} points, how many could {he} [get|buy]?",
            "{who} and {other} collected bottles. {who} brought {a} pounds and {other} {b} pounds. They get one dollar for every {c} pounds. How many dollars did they [get|earn]?",
        ),
        ("That is {eq} in all.", "The answer is {eq}."),
        {
            "things": words.PRICED,
            "a_thing": [words.article(thing) for thing in words.CHEAP],
            "earning": words.EARNED,
            "more": words.EARNED,
            "kin": words.RELATIVES,
        },
    ),
    Tale(
        "a + b / c",
        (
            "{who} can carry {c} {things} at a time. If there are {a} {things} [in one room|on one table|upstairs] and {b} in another [place|], how many trips [will {he} make|does {he} need]?",
            "{who} [must|has to] move {a} {things} from the garage and {b} from the attic. {he} takes {c} each time. How many trips is that?",
            "{who} took {a} pictures at the lake and {b} [pictures|] in the city. If {he} [puts|sorts] them into {c} albums with the same number in each, how many are in each album?",
            "{who} and {other} have {a} and {b} {things}. They put all of them together and share them equally among {c} [friends|classmates]. How many does each [get|receive]?",
            "{who} read {a} pages on {day} and {b} pages on the next day. If every chapter has {c} pages, how many chapters did {he} read?",
            "{who} picked {a} {things} in the morning and {b} in the afternoon. If {c} fit into one {box}, how many {boxes} did {he} fill?",
        ),
        ("There are {eq} of them.", "The answer is {eq}."),
        {"things": words.THINGS, "boxes box": words.HOLDING, "day": words.DAYS},
    ),
    # one after the other
    Tale(
        "a - b + c",
        (
            "{who} had {a} {things}. If {he} [gave away|lost|sold|used] {b} [of them|] but then [bought|found|got] {c} more, how many [{things}|] [would|does|did] {he} have [in total|now|then|]?",
            "{who} won {a} {things} at a fair. {he} traded {b} [of them|] for a hat, and later won {c} more. How many {things} [did|does] {he} have [in the end|]?",
            "There were {a} {crowd} at the {place}. If {b} {gone} and [another|then] {c} [more|] {come}, how many {crowd} [are|were|would be] [there|at the {place}] [now|then|]?",
            "The {place} had {a} {crowd} [in the morning|at noon|]. {b} {gone}, but {c} others {come}. How many {crowd} were at the {place} [then|in the end]?",
            "In {month}, {who} had {a} dollars. By {later} {he} had spent {b} dollars. If {he} got [another|] {c} dollars from {his} {kin}, how much [money|] would {he} have?",
            "{who} had {a} files on {his} computer. {he} deleted {b} [old|] ones and downloaded {c} new ones. How many [files|] does {he} have now?",
        ),
        ("After that, {eq} are left.", "Then there are {eq}."),
        {
            "things": words.THINGS,
            "crowd place gone come": words.CROWDS,
            "month": ("January", "March", "May"),
            "later": ("July", "August", "fall"),
            "kin": words.RELATIVES,
        },
    ),
    Tale(
        "a + b - c",
        (
            "{who} has {a} {one} and {b} {two}. If {he} [gives away|sells|loses|uses] {c} of [the {many}|them], how many {many} does {he} [still|] have [left|]?",
            "{who} [picked|bought|counted|had] {a} {one} and {b} {two}. {he} only [needed|used|kept] {c} of the {many} [though|]. How many {many} were [not used|left over|extra]?",
            "There were {a} {one} and {b} {two}. {c} [of the {many}|of them] [left|were taken away|were sold|went away]. How many {many} were left?",
            "{who} had to [count|check|sort|clean] {a} {one} and {b} {two}. If {he} had [only|] done {c} of them by noon, how many [did {he} still have to do|were not done|more did {he} have to do]?",
            "A shop had {a} {one}, and {b} {two} came. Of the {many}, {c} were moved to [another|a second] shop. How many {many} stayed?",
            "{who} took {a} photos on {day} and {b} on the next day. If {he} [later|] deleted {c} of them, how many [photos|] did {he} still have?",
            "The kitchen ordered {a} {one} and {b} {two}. If only {c} [{many}|] were used, how many extra [{many}|] did it [have|end up with]?",
        ),
        ("There are {eq} in all.", "{eq} are left."),
        {"one two many": words.OWNED, "day": words.DAYS},
    ),
    Tale(
        "a + b - c",
        (
            "{who} bought two books. One has {a} pages and the other [has|] {b}. {he} has [already|] read {c} [of the|] pages. How many pages does {he} [still|] have to read?",
            "There were {a} {crowd} at the {place}, and then {b} more {come}. If {c} of them did not [pay|stay|eat], how many did?",
            "{who} has {a} {things} and {other} has {b}. Together they need {c} fewer than that for a game. How many do they need?",
            "At {one_time} there were {a} {crowd} at the {place}. Another {b} {come}, and [after that|then] {c} {gone}. How many {crowd} were left?",
        ),
        ("There are {eq} in all.", "The answer is {eq}."),
        {
            "things": words.THINGS,
            "crowd place gone come": words.CROWDS,
            "one_time": ("noon", "nine o'clock", "first", "two o'clock"),
        },
    ),
    Tale(
        "a - b - c",
        (
            "{who} had {a} {things}. {he} gave {b} to {his} {kin} and {c} to {other}. How many [{things}|] does {he} have [left|]?",
            "A shop had {a} {things}. It sold {b} in the morning and {c} in the afternoon. How many {things} [were|are] left?",
            "Of {a} {things}, {b} are {color} and {c} are {tint}. How many are neither {color} nor {tint}?",
            "{who} wants to save {a} dollars. {he} has {b} dollars and {his} {kin} gave {him} {c}. How many [more|] dollars does {he} [still|] need?",
            "{who} must read {a} pages. {he} read {b} [pages|] on {day} and {c} on the next day. How many pages are left [to read|]?",
        ),
        ("{eq} are left after the first part.", "{eq} are left in the end."),
        {
            "things": words.THINGS,
            "kin": words.RELATIVES,
            "color": words.COLORS[:5],
            "tint": words.COLORS[5:],
            "day": words.DAYS,
        },
    ),
    Tale(
        "a + b + c",
        (
            "{who} has {a} {things}, {other} has {b} and {his} {kin} has {c}. How many [{things}|] do they have [together|in all|altogether]?",
            "{who} sold {a} {things} on {day}, {b} on the next day and {c} on the day after [that|]. How many did {he} sell [in all|in total]?",
            "{who} spent {a} dollars on {dear}, {b} dollars on food and {c} dollars on gas. How much did {he} spend [in all|]?",
            "{who} still has {a} {things} after [giving {b} to {other} and {c} to {his} {kin}|{he} gave {b} to {other} and {c} to {his} {kin}]. How many [{things}|] did {he} have at [first|the start]?",
        ),
        ("That is {eq}.", "In all, that is {eq}."),
        {
            "things": words.THINGS,
            "kin": words.RELATIVES,
            "day": words.DAYS,
            "dear": [words.article(thing) for thing in words.DEAR],
        },
    ),
    # a product or a share first
    Tale(
        "a * b - c",
        (
            "{who} has {a} {boxes} with {b} {things} in each [{box}|]. If {c} of the {things} are [broken|used|eaten|lost], how many are left?",
            "{who} bought {a} {boxes} of {b} {things} and used {c} [of the {things}|{things}]. How many [{things}|] does {he} [still|] have?",
            "{who} worked {a} hours for {b} dollars an hour and [then|] spent {c} dollars [on lunch|at a shop|]. How much [money|] does {he} have left?",
            "There are {a} rows of {b} seats. {c} seats are [empty|taken|broken]. How many are not?",
            "{who} sold {a} {things} for {b} dollars each. The {things} had cost {him} {c} dollars [in all|]. How much did {he} gain?",
        ),
        ("At first that is {eq}.", "The answer is {eq}."),
        {"things": words.THINGS, "boxes box": words.HOLDING},
    ),
    Tale(
        "a * b + c",
        (
            "{who} has {a} {boxes} with {b} {things} in each, and {c} [more|loose|single] {things}. How many {things} does {he} have [in all|]?",
            "{who} bought {a} {goods} for {b} dollars each and {dear} for {c} dollars. How much did {he} [pay|spend] [in total|]?",
            "{who} reads {b} pages a day for {a} days, and {c} pages on the last day. How many pages [is that|does {he} read]?",
            "A taxi costs {c} dollars plus {b} dollars for each mile. How much does a ride of {a} miles cost?",
            "{who} had {c} dollars and then earned {b} dollars a day for {a} days. How much [money|] does {he} have [now|]?",
        ),
        ("First, that is {eq}.", "In all, that is {eq}."),
        {
            "things": words.THINGS,
            "boxes box": words.HOLDING,
            "goods": words.PRICED,
            "dear": [words.article(thing) for thing in words.DEAR],
        },
    ),
    Tale(
        "a * b / c",
        (
            "{who} has {a} {boxes} of {b} {things}. If {he} shares the {things} equally among {c} friends, how many does each [friend|] get?",
            "There are {a} {boxes} with {b} {things} each. {who} puts all of the {things} on {c} plates, the same number on each. How many are on a plate?",
            "{who} saved {b} dollars a week for {a} weeks. How many {goods} at {c} dollars each can {he} buy?",
            "It takes {a} workers {b} days [each|] to do a job. How many days would {c} workers take?",
        ),
        ("That is {eq} in all.", "The answer is {eq}."),
        {"things": words.THINGS, "boxes box": words.HOLDING, "goods": words.PRICED},
    ),
    Tale(
        "a / b * c",
        (
            "{b} {goods} cost {a} dollars. How much do {c} {goods} cost?",
            "{who} fills {b} {boxes} with {a} {things}, the same number in each. How many {things} are in {c} {boxes}?",
            "{who} {makes} {a} {things} in {b} hours. At this rate, how many can {he} {make} in {c} hours?",
            "A machine uses {a} gallons of water in {b} days. How many gallons does it use in {c} days?",
            "{who} walked {a} miles in {b} days, the same distance every day. How far would {he} walk in {c} days?",
        ),
        ("For one, that is {eq}.", "For {c}, that is {eq}."),
        {
            "things": words.THINGS,
            "boxes box": words.HOLDING,
            "goods": words.PRICED,
            "makes make": (("packs", "pack"), ("sells", "sell"), ("sorts", "sort"), ("wraps", "wrap")),
        },
    ),
    Tale(
        "a / b - c",
        (
            "{who} and {his} friends shared {a} {things} equally among the {b} of them. {who} [then|] [ate|lost|gave away] {c} of {his}. How many {things} does {he} have left?",
            "{who} put {a} {things} into {b} {boxes}, the same number in each. {he} took {c} out of one {box}. How many are left in that {box}?",
            "{b} friends split a bill of {a} dollars equally. {who} had a coupon for {c} dollars off {his} part. How much did {he} pay?",
            "{who} cut {a} feet of rope into {b} equal pieces and then took {c} feet off one [of them|piece]. How long is that piece now?",
        ),
        ("Each one is {eq}.", "After that, {eq} are left."),
        {"things": words.THINGS, "boxes box": words.HOLDING},
    ),
    Tale(
        "a / b + c",
        (
            "{who} and {his} friends shared {a} {things} equally among the {b} of them. {who} already had {c}. How many {things} does {he} have now?",
            "{a} {things} were divided equally among {b} {boxes}. Then {who} put {c} more into one {box}. How many are in that {box} [now|]?",
            "{who} [drove|rode] {a} miles in {b} days, the same distance each day, and {c} miles on the day after [that|]. How far did {he} go on the first and the last day together?",
        ),
        ("Each one is {eq}.", "Now that is {eq}."),
        {"things": words.THINGS, "boxes box": words.HOLDING},
    ),
    # three operations
    Tale(
        "a + b - c / d",
        (
            "{who} has {a} {one} and {b} {two}. {he} [gives away|sells] {c} of them and puts the rest in groups of {d}. How many groups [are there|does {he} have]?",
            "There were {a} {one} and {b} {two}. {c} of the {many} were gone by noon, and {d} {many} fit on one tray. How many trays [were needed for the rest|did the rest need]?",
            "{who} earned {a} dollars {earning} and {b} dollars {more}. If {he} spent {c} dollars on food, how many {d} dollar {things} could {he} buy [with the rest|with what was left]?",
            "{who} had {a} {things} and [bought|got] {b} more. {his} {kin} took {c}. If {who} shares the others equally among {d} friends, how many does each get?",
        ),
        ("There are {eq} at first.", "{eq} are left.", "The answer is {eq}."),
        {
            "one two many": words.OWNED,
            "things": words.PRICED,
            "earning": words.EARNED,
            "more": words.EARNED,
            "kin": words.RELATIVES,
        },
    ),
    Tale(
        "a + b - c * d",
        (
            "{who} has {a} {one} and {b} {two}. {he} sells all but {c} of them for {d} dollars each. How much [money|] does {he} get?",
            "{who} baked {a} pies on {day} and {b} on the next day. {c} of them burned. If {he} sells the others for {d} dollars each, how much [money|] does {he} make?",
            "There were {a} {jobs} to {do}, and {b} more came in. {who} has {done} {c} [of them|]. Each takes {d} minutes. How many minutes will the rest take?",
        ),
        ("There are {eq} in all.", "That leaves {eq}.", "The answer is {eq}."),
        {"one two many": words.OWNED, "jobs do done": words.JOBS, "day": words.DAYS},
    ),
    Tale(
        "a - b - c / d",
        (
            "{who} had {a} dollars. {he} spent {b} dollars on {dear} and {c} dollars on food. How many {things} at {d} dollars each can {he} buy with the rest?",
            "{who} had {a} {goods}. {he} gave {b} to {his} {kin} and {c} to {other}, and put the rest into {boxes} of {d}. How many {boxes} did {he} fill?",
            "A class of {a} has {b} students at home and {c} at the nurse. The others work in teams of {d}. How many teams are there?",
        ),
        ("After the first part, {eq} are left.", "Then {eq} are left.", "The answer is {eq}."),
        {
            "things": words.PRICED,
            "goods": words.THINGS,
            "boxes box": words.HOLDING,
            "dear": [words.article(thing) for thing in words.DEAR],
            "kin": words.RELATIVES,
        },
    ),
    Tale(
        "a + b * c - d",
        (
            "{who} sold {a} {one} and {b} {two} for {c} dollars each. {he} had paid {d} dollars for [the stand|a table at the market|gas]. How much did {he} gain?",
            "Each {one_} is worth {c} points. {who} {got} {a} {many_} in the first {part} and {b} in the second, but lost {d} points [for a foul|at the end]. What was {his} score?",
            "{who} reads {a} pages in the morning and {b} in the evening, every day for {c} days. {d} of the pages had only pictures. How many pages had text?",
        ),
        ("There are {eq} at a time.", "That makes {eq}.", "{eq} are left."),
        {"one two many": words.OWNED, "one_ many_ got part": words.POINTS},
    ),
    Tale(
        "a + b + c / d",
        (
            "{who} picked {a} {things} on {day}, {b} on the next day and {c} on the third. {he} put them into {boxes} of {d}. How many {boxes} did {he} fill?",
            "{who} has {a}, {other} {b} and {his} {kin} {c} {things}. If they put them together and share them equally among {d} people, how many does each get?",
            "{a} {one}, {b} {two} and {c} guides go on a trip. If {d} people fit in a van, how many vans do they need?",
        ),
        ("First, that is {eq}.", "In all, there are {eq}.", "The answer is {eq}."),
        {
            "things": words.THINGS,
            "boxes box": words.HOLDING,
            "day": words.DAYS,
            "kin": words.RELATIVES,
            "one two": (("boys", "girls"), ("adults", "children"), ("teachers", "students"), ("parents", "players")),
        },
    ),
    Tale(
        "a * b - c / d",
        (
            "{who} bought {a} {boxes} of {b} {things}. {c} [of them|{things}] were bad. If {he} shares the good ones equally among {d} friends, how many does each get?",
            "{who} worked {a} hours at {b} dollars an hour and spent {c} dollars on food. How many {goods} at {d} dollars each can {he} buy with the rest?",
            "There are {a} rows with {b} {things} in each. After {who} took {c} [of them|], the rest went into {boxes} of {d}. How many {boxes} is that?",
        ),
        ("First, that is {eq}.", "{eq} are left.", "The answer is {eq}."),
        {"things": words.THINGS, "boxes box": words.HOLDING, "goods": words.PRICED},
    ),
    Tale(
        "a * b ; c * d",
        (
            "{who} bought {a} {goods} for {b} dollars each and {c} {more} for {d} dollars each. How much did {he} spend [in all|]?",
            "{who} has {a} {boxes} of {b} {things} and {c} {boxes} of {d} [{things}|]. How many {things} does {he} have [in all|altogether]?",
            "{who} worked {a} hours for {b} dollars an hour and {c} hours for {d} dollars an hour. How much did {he} earn?",
            "There are {a} rows of {b} seats and {c} rows of {d} seats. How many seats are there?",
        ),
        ("The first part is {eq}.", "The second part is {eq}.", "Together, that is {eq}."),
        {"things": words.THINGS, "boxes box": words.HOLDING, "goods": words.PRICED, "more": words.FOOD},
    ),
)


def everyday(s: Story, steps: int) -> None:
    """One of the tales, with numbers that come out even."""
    tale = s.rng.choice([tale for tale in TALES if tale.operations == steps])
    s.person()
    s.person("other")
    for names, options in tale.slots.items():
        chosen = s.rng.choice(options)
        split = names.split()
        s.set(**dict(zip(split, chosen if len(split) > 1 else (chosen,))))  # type: ignore[call-overload]
    text = s.rng.choice(tale.texts)
    small = set(re.findall(r"[*/] (\w)", tale.formula)) | set(re.findall(r"(\w) \*", tale.formula))
    factors = {letter: s.few(12) for letter in sorted(small)}
    for _ in range(200):
        s.lines.clear()
        numbers = {letter: factors.get(letter) or s.number() for letter in re.findall(r"[a-d]", tale.formula)}
        try:
            _work(s, tale, numbers)
        except Reject:
            continue
        s.tense = 1
        s.ask(text, **numbers)
        return
    raise Reject


def _work(s: Story, tale: Tale, numbers: Mapping[str, Number]) -> None:
    """The lines of work. Rejects results below 2."""
    lines = iter(tale.work)

    def step(left: Number, sign: str, right: Number) -> Number:
        value = s.work(next(lines), left, sign, right, **numbers)
        if value < 2:
            raise Reject
        return value

    parts = []
    for part in tale.formula.split(" ; "):
        first, *rest = part.split()
        value = numbers[first]
        for sign, letter in zip(rest[::2], rest[1::2]):
            value = step(value, sign, numbers[letter])
        parts.append(value)
    if len(parts) == 2:
        step(parts[0], "+", parts[1])


SITUATIONS = [Situation(everyday, range(2, 4), 45.0, held_out=False)]
