"""Lines of code and text by directory, at some commits and as the files are now.

python scripts/count_lines.py 5f0b370
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE, TEXT = (".py", ".cpp", ".yaml"), (".md",)
RECORDS = "benchmarks/results"


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def count(commit: str | None) -> Counter[str]:
    """Lines by directory: of a commit, or of the working tree's tracked files."""
    lines: Counter[str] = Counter()
    names = git("ls-files") if commit is None else git("ls-tree", "-r", "--name-only", commit)
    for name in names.splitlines():
        if (
            name.startswith(RECORDS)
            or not name.endswith(CODE + TEXT)
            or (commit is None and not (ROOT / name).exists())
        ):
            continue
        text = (ROOT / name).read_text(encoding="utf-8") if commit is None else git("show", f"{commit}:{name}")
        place = "text (.md)" if name.endswith(TEXT) else (name.partition("/")[0] if "/" in name else ".") + "/"
        lines[place] += len(text.splitlines())
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("commits", nargs="*", metavar="COMMIT")
    commits = parser.parse_args().commits
    counts = {name: count(name) for name in commits} | {"now": count(None)}
    places = sorted(set().union(*counts.values()), key=lambda place: (place.endswith(")"), place))
    rows = [[place, *(of[place] for of in counts.values())] for place in places]
    rows.append(["code", *(sum(n for place, n in of.items() if place.endswith("/")) for of in counts.values())])
    print("lines".ljust(14) + "".join(name.rjust(12) for name in counts))
    for place, *numbers in rows:
        print(place.ljust(14) + "".join(str(number).rjust(12) for number in numbers))


if __name__ == "__main__":
    main()
