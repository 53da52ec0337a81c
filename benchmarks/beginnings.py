"""Print beginnings of children's stories, made by a seeded program: raw text for a target to continue.

    python -m benchmarks.beginnings train 1500 > beginnings.jsonl

The kinds "train" and "judge" share no template, name, animal, place, object or event. Train on one and judge on the
other. "task" asks for a story about a child, an animal and an object. IFEval's keyword checker looks for all three, so
a drafter that cannot read instructions fails there.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# {kind: {slot: phrases}}
WORDS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def beginnings(kind: str, count: int, seed: int = 0) -> list[str]:
    """Return ``count`` different beginnings of the kind "train" or "judge". A smaller count gives a prefix of them."""
    words, draw, texts = WORDS[kind], random.Random(seed), dict[str, None]()
    while len(texts) < count:
        child, other = draw.sample(words["child"], 2)
        slots = {slot: draw.choice(words[slot]) for slot in ("animal", "trait", "place", "thing", "event", "template")}
        texts[slots.pop("template").format(child=child, other=other, **slots)] = None
    return list(texts)


def tasks(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``count`` rows that ask for a story with three things in it, with IFEval's check of keywords."""
    words, draw, rows_by_text = WORDS["judge"], random.Random(seed), dict[str, dict[str, Any]]()
    while len(rows_by_text) < count:
        child, animal, thing = (draw.choice(words[slot]) for slot in ("child", "animal", "thing"))
        article = "an" if animal[0] in "aeiou" else "a"
        text = f"This is a story for children about {article} {animal} called {child} and {thing}.\n\nOnce upon a time"
        patterns = [rf"\b{word}\b" for word in (animal, child, thing.split()[-1])]  # the checker searches for patterns
        rows_by_text[text] = {
            "prompt": text, "source": "stories", "instruction_id_list": ["keywords:existence"] * len(patterns),
            "kwargs": [{"keywords": [word]} for word in patterns],
        }  # fmt: skip
    return list(rows_by_text.values())


def rows(kind: str, count: int, seed: int = 0) -> str:
    """Return JSON lines of :func:`tasks` for the kind "task", else of :func:`beginnings`."""
    dicts = tasks(count, seed) if kind == "task" else [
        {"prompt": text, "source": "stories"} for text in beginnings(kind, count, seed)
    ]  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in dicts)


def main(args: Sequence[str] | None = None) -> None:
    """Print the rows of KIND COUNT [SEED]."""
    kind, count, *seed = sys.argv[1:] if args is None else args
    print(rows(kind, int(count), *map(int, seed)), end="")


if __name__ == "__main__":
    main()
