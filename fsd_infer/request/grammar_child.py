"""A process that tries grammars: one that overflows the stack of llguidance's recursion ends this process, no other.

:mod:`.grammars` runs this file as a script. It reads requests from standard input and answers them on standard output,
a line of JSON each. It imports only llguidance and the standard library, so it starts in a tenth of a second.
Standard error is a file to which llguidance writes the grammar's rules.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

STACK = 16 << 20  # bytes; 1,000 rules or references that follow each other take up to 7 MiB
MEMORY = 4 << 30  # bytes
NAMED = "Grammar:", "== Optimize ==>"  # what encloses the rules in llguidance's log
SCHEMA = "json-schema:///"  # begins llguidance's names for the parts of a schema
TOO_DEEP = "recursion limit exceeded"  # as llguidance says it of JSON
ALL_RULES = 3  # llguidance's log level at which it writes every rule


class Bytes:
    """A vocabulary of the 256 bytes, an end-of-text token and the special tokens that a grammar names."""

    eos_token_id, bos_token_id = 256, None

    def __init__(self, grammar: str) -> None:
        names = sorted(set(re.findall(r"<[^<>\[\]\s]{1,100}>", grammar)))[:1000]
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>", *(name.encode() for name in names)]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def problem_of(matcher: Any) -> str:
    """Return why no answer can begin, empty if one can."""
    for _ in range(2):  # before and after the text that every answer begins with
        if not matcher.is_stopped():
            matcher.compute_bitmask()
            matcher.try_consume_tokens(matcher.compute_ff_tokens()[:64])
    return str(matcher.get_error())


def rules_of(log: str) -> dict[str, list[list[str]]]:
    """Return the rules in llguidance's log: name -> alternatives, each a list of names and terminals."""
    rules: dict[str, list[list[str]]] = defaultdict(list)
    name = ""
    for line in log.partition(NAMED[0])[2].partition(NAMED[1])[0].splitlines():
        left, arrow, right = line.partition("⇦ ")
        if arrow:
            name = left.strip().removesuffix("::_") or name
            rules[name].append(right.partition("  ")[0].split())
    return rules


def endless(rules: dict[str, list[list[str]]]) -> str | None:
    """Return the name of a reachable rule that no finite text satisfies; None if there is none."""
    parts = {name: [list(_known(rule, rules)) for rule in known] for name, known in rules.items()}
    users: dict[str, list[list[str]]] = defaultdict(list)  # rule -> alternatives that it is part of
    left: dict[int, tuple[str, int]] = {}  # alternative -> its rule's name, and how many parts no text ends yet
    ended: set[str] = set()
    queue: list[str] = []
    for name, known in parts.items():
        for rule in known:
            left[id(rule)] = name, len(rule)
            queue += [] if rule else [name]
            for part in rule:
                users[part].append(rule)
    while queue:
        name = queue.pop()
        if name not in ended:
            ended.add(name)
            for rule in users[name]:
                owner, count = left[id(rule)]
                left[id(rule)] = owner, count - 1
                queue += [owner] if count == 1 else []
    seen, queue, never_end = {"start"}, ["start"], list[str]()
    while queue:
        name = queue.pop()
        if name in parts and name not in ended and not name.startswith("#"):  # llguidance's own names
            never_end.append(name)
        new = {part for rule in parts.get(name, ()) for part in rule} - seen
        seen |= new
        queue += new
    return max(never_end, key=lambda name: (SCHEMA in name, not name.startswith("start")), default=None)


def _known(rule: list[str], rules: dict[str, list[list[str]]]) -> Iterator[str]:
    """The rules within an alternative; the rest are terminals."""
    for part in rule:
        name = part if part in rules else part.rpartition("::")[0]
        if name in rules:
            yield name


def try_grammar(maker: str, text: str, options: list[Any], read_log: Callable[[], str]) -> dict[str, str]:
    """Try a grammar.

    Args:
        maker: the method of llguidance's LLMatcher that reads the text.
        text: the grammar.
        options: llguidance's bounds, then further arguments of the maker.
        read_log: reads what llguidance has written.

    Returns:
        {"grammar": as llguidance serialises it}, or {"problem": why no answer follows}.
    """
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    bounds, *more = options
    try:
        grammar = getattr(LLMatcher, maker)(text, *more)
        words = Bytes(text if maker == "grammar_from_lark" else "")
        vocabulary = LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=words.eos_token_id)
    except ValueError as error:
        return {"problem": str(error)}
    limits = LLParserLimits(**bounds)
    if problem := LLMatcher(vocabulary, grammar, limits=limits, log_level=ALL_RULES).get_error():
        # complaints about tokens are left to the check with the target's vocabulary
        problem = LLMatcher.validate_grammar(grammar) or ("" if "oken" in problem else problem)
        return {"problem": problem} if problem else {"grammar": grammar}
    if (name := endless(rules_of(read_log()))) is not None:
        where = name.partition(SCHEMA)[2] or name.partition("#")[0]
        return {"problem": f"no text can end {where}, which always needs itself again."}
    if problem := problem_of(LLMatcher(vocabulary, grammar, limits=limits, log_level=0)):
        return {"problem": f"no answer can begin: {problem}"}
    return {"grammar": grammar}


def log_reader() -> Callable[[], str]:
    """Empty the log. Return a function that reads what was written to it since."""
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)

    def read() -> str:
        end = os.lseek(2, 0, os.SEEK_END)
        os.lseek(2, 0, os.SEEK_SET)
        parts = iter(lambda: os.read(2, end), b"")
        return b"".join(parts).decode("utf-8", "replace")

    return read


def answer_all() -> None:
    """Answer requests until standard input ends."""
    for line in sys.stdin.buffer:
        try:
            maker, text, options = json.loads(line)
            answer = try_grammar(maker, text, options, log_reader())
        except RecursionError:
            answer = {"problem": TOO_DEEP}
        except BaseException as error:  # panics of Rust are not Exceptions
            answer = {"problem": f"{type(error).__name__}: {error}"}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    """Run :func:`answer_all` with the stack and within the memory that a grammar may take."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and then standard input
    with suppress(ImportError, ValueError, OSError):  # Windows has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    threading.stack_size(STACK)
    thread = threading.Thread(target=answer_all)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
