"""Beginnings of children's stories, made by a seeded program: raw text for a target to continue.

    python -m benchmarks.beginnings train 1500 > beginnings.jsonl

The kinds "train" and "judge" share no template, name, animal, place, object or event: train on one, judge on the other.
"task" asks for a story with a character, an animal and an object of "judge", which IFEval's checker of keywords looks
for: a drafter that cannot read instructions fails there.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from typing import Any

WORDS: dict[str, dict[str, list[str]]] = {
    "train": {
        "child": """Lily Tom Anna Ben Mia Sam Lucy Max Emma Jack Sara Tim Ella Leo Rosie Noah Amy Finn Zoe Peter Nora
            Jake Molly Oscar Clara Henry Daisy Will Jane Freddie""".split(),
        "animal": """dog cat rabbit bear duck mouse fox pig lion bird frog horse turtle sheep squirrel kitten
            puppy""".split(),
        "trait": "little brave shy curious happy kind lonely clever sleepy noisy gentle proud".split(),
        "place": """a small village|a big forest|a quiet farm|a house near the sea|a busy town|a green valley
            |a tall tower|an old mill|a cottage by the river|a sunny garden""".split("|"),
        "thing": """a red ball|a shiny key|a paper boat|an old map|a blue kite|a wooden box|a magic stone|a silver bell
            |a toy train|a warm scarf|a golden feather|a broken clock""".split("|"),
        "event": """it started to rain|a stranger knocked on the door|the wind blew very hard|a big storm came
            |something moved in the bushes|the lights went out|a letter arrived|a loud noise woke everyone up
            |snow began to fall|a door opened by itself""".split("|"),
        "template": """Once upon a time, there was a {trait} {animal} who lived in {place}. One day,
            |Once upon a time, in {place}, there lived a {trait} child named {child}, who had {thing}.
            |{child} and {other} were playing in {place}. Suddenly, {event}.
            |One day, a child named {child} found {thing} in {place}.
            |There was once a {trait} {animal} called {child}. Every morning, the {animal} liked to
            |One morning, {child} woke up and saw {thing} on the table.
            |{child} had a {trait} {animal}. They went to {place} together, but {event}.
            |The {trait} {animal} wanted to have {thing}. "Can you help me?" it asked {child}.""".split("|"),
    },
    "judge": {
        "child": """Alice Harry Maya Theo Ivy Charlie Poppy George Hazel Arthur Ruby Felix Lola Hugo Penny
            Simon""".split(),
        "animal": "elephant hedgehog penguin monkey owl goat tiger bee dragon deer".split(),
        "trait": "tiny friendly hungry silly grumpy careful".split(),
        "place": """the mountains|a castle on a hill|an island far away|the zoo|the school yard
            |a dark cave""".split("|"),
        "thing": """a yellow umbrella|a glass marble|a big pumpkin|a purple hat|a music box
            |a pair of boots""".split("|"),
        "event": """the bridge broke|a bright star fell from the sky|all the flowers turned blue|the boat began to sink
            |the teacher disappeared|they heard someone crying""".split("|"),
        "template": """Long ago, a {trait} {animal} and a child called {child} were best friends. They
            |It was a cold winter night in {place}. {child} was looking for {thing} when {event}.
            |{child}'s grandmother came to visit and brought {thing}. "Be careful," she said,
            |Nobody in {place} had ever seen a {trait} {animal} before. When {child} met it,
            |On the last day of summer, {child} and a {trait} {animal} went to {place}. Then {event}.
            |{child} was sad because {event}. A {trait} {animal} came and said,""".split("|"),
    },
}  # fmt: skip


def beginnings(kind: str, count: int, seed: int = 0) -> list[str]:
    """``count`` different beginnings of a kind, "train" or "judge"; those of a smaller count are their prefix."""
    words = {slot: [text.strip() for text in texts] for slot, texts in WORDS[kind].items()}
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        child, other = draw.sample(words["child"], 2)
        slots = {slot: draw.choice(words[slot]) for slot in ("animal", "trait", "place", "thing", "event", "template")}
        found[slots.pop("template").format(child=child, other=other, **slots)] = None
    return list(found)


def tasks(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """``count`` rows that ask for a story with three things in it, with IFEval's check that they are there."""
    words, draw, found = WORDS["judge"], random.Random(seed), {}
    while len(found) < count:
        child, animal, thing = (draw.choice(words[slot]) for slot in ("child", "animal", "thing"))
        article = "an" if animal[0] in "aeiou" else "a"
        text = f"This is a story for children about {article} {animal} called {child} and {thing}.\n\nOnce upon a time"
        kept = [rf"\b{word}\b" for word in (animal, child, thing.split()[-1])]  # the checker searches for patterns
        found[text] = {
            "prompt": text, "source": "stories", "instruction_id_list": ["keywords:existence"] * len(kept),
            "kwargs": [{"keywords": [word]} for word in kept],
        }  # fmt: skip
    return list(found.values())


def main(args: Sequence[str] | None = None) -> None:
    """Print rows of :func:`beginnings` or :func:`tasks`: KIND COUNT [SEED]."""
    kind, count, *seed = sys.argv[1:] if args is None else args
    given = int(count), *map(int, seed)
    told = [{"prompt": text, "source": "stories"} for text in beginnings(kind, *given)] if kind in WORDS else None
    for row in tasks(*given) if told is None else told:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
