"""Count the long sentences in pages, recipes' comments and docstrings, and print the longest.

    python scripts/prose.py [--over 30] [--worst 10] [--max-share 0.02] [--hold docs fsd_infer ...]

Code blocks, tables and the addresses of links are skipped. A code span counts as one word.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md")
PACKAGES = ("fsd_core", "fsd_infer", "fsd_bench", "fsd_train", "benchmarks", "scripts", "examples", "tests")
NOT_PROSE = [(r"!\[[^]]*\]\([^)]*\)|<[^>\s][^>]*>", ""), (r"\[([^]]*)\]\([^)]*\)", r"\1"), (r"(`+).+?\1", "code")]
STARTS = re.compile(r"^\s*([-*+]|\d+\.|#+|>)\s")  # a list item, a heading or a quotation
CODE = re.compile(r"\s*(\||```|>>>)|.*\S {3,}\S")  # and tables, of Markdown or set with spaces
ENDS = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!et al)(?<!vs)(?<!cf)[.!?][)\"'”*_]*\s+")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes):$")


class Sentence(NamedTuple):
    """A sentence and the place where its paragraph begins."""

    where: str
    text: str
    words: int


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number of the first line, from 0, and the text of every paragraph, list item and argument."""
    begun, lines, fenced, tabled, section, after_blank = 0, list[str](), False, False, False, True
    for number, line in enumerate([*text.splitlines(), ""]):
        fenced ^= line.lstrip().startswith("```")
        tabled = line.startswith("==") or (tabled and bool(line.strip()))
        code = fenced or tabled or CODE.match(line) is not None or (line[:4] == "    " and after_blank)
        heading = SECTION.match(line) is not None
        argument = section and re.match(r" {4}\S", line) is not None
        after_blank = not line.strip() or (after_blank and code)
        section = heading or (section and not after_blank)
        if code or after_blank or heading or argument or STARTS.match(line):
            if lines:
                yield begun, " ".join(lines)
            lines = []
        if not (code or after_blank or heading):
            begun = begun if lines else number
            lines.append(STARTS.sub("", line).strip())


def sentences(text: str, file: Path, first: int = 1) -> Iterator[Sentence]:
    """Yield the sentences of a page or docstring whose line `first` in the file is its first."""
    for line, paragraph in paragraphs(text):
        for pattern, prose in NOT_PROSE:
            paragraph = re.sub(pattern, prose, paragraph)
        for part in filter(str.strip, ENDS.split(paragraph)):
            yield Sentence(f"{file}:{first + line}", part, sum(any(map(str.isalnum, word)) for word in part.split()))


def prose(root: Path) -> Iterator[tuple[str, Sentence]]:
    """Yield every sentence under the root with its group: docs, recipes or the name of a package."""
    for file in sorted(file for page in PAGES for file in root.glob(page)):
        yield from (("docs", found) for found in sentences(file.read_text("utf-8"), file.relative_to(root)))
    for file in sorted(root.glob("recipes/*.yaml")):
        lines = (re.sub(r"^.*\S.*\s# ", "# - ", line) for line in file.read_text("utf-8").splitlines())
        comments = "\n".join(line.removeprefix("#").strip() if line.startswith("#") else "" for line in lines)
        yield from (("recipes", found) for found in sentences(comments, file.relative_to(root)))
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                    line = node.body[0].lineno
                    yield from ((package, found) for found in sentences(text, file.relative_to(root), line))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Count long sentences and print the longest.")
    parser.add_argument("--over", type=int, default=30, help="words above which a sentence is long (%(default)s)")
    parser.add_argument("--worst", type=int, default=10, help="how many of the longest to print (%(default)s)")
    parser.add_argument("--max-share", type=float, default=1.0, help="largest share of long sentences (%(default)s)")
    parser.add_argument("--hold", nargs="+", default=["docs"], help="groups held to that share (docs)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to read")
    args = parser.parse_args(argv)
    found, too_many = list(prose(args.root)), []
    print(f"{'group':12} {'sentences':>10} {'over ' + str(args.over):>8} {'share':>7}")
    for group, count in Counter(group for group, _ in found).items():
        long = sum(sentence.words > args.over for name, sentence in found if name == group)
        print(f"{group:12} {count:10} {long:8} {long / count:7.1%}")
        if group in args.hold and long > args.max_share * count:
            too_many.append(group)
    for _, sentence in sorted(found, key=lambda pair: -pair[1].words)[: args.worst]:
        print(f"{sentence.words:4} {sentence.where}: {sentence.text}")
    if too_many:
        print(f"More than {args.max_share:.1%} long sentences in {', '.join(too_many)}: split them.", file=sys.stderr)
    return bool(too_many)


if __name__ == "__main__":
    sys.exit(main())
