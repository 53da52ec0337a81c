"""Score answers that are programs by running them: in a process of their own, with limits on time, memory and files.

This is not a sandbox: a program can read what this user can, and reach the network. So nothing runs without a flag.
"""

from __future__ import annotations

import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 10.0  # per run
MEMORY = 4 * 2**30  # bytes of address space
WRITTEN = 2**20  # bytes per file
_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_CALL = """
import json as _json
_case = _json.loads({case!r})
_made = {entry}(*[_json.loads(_line) for _line in _case["input"].split("\\n") if _line.strip()])
_wanted = _json.loads(_case["output"])
assert _made == _wanted or list(_made) == _wanted
"""


def code_of(answer: str) -> str:
    """Return an answer's last code block, or the whole answer without one."""
    blocks = _BLOCK.findall(answer)
    return str(blocks[-1]) if blocks else answer


def solves(answer: str, program: Mapping[str, Any]) -> bool:
    """Return whether the answer's code passes all tests.

    Args:
        answer: text with a code block, or code.
        program: "kind" "asserts": "tests" is code that fails by an exception, and "begun" the function's beginning,
            which an answer may repeat. "cases": "tests" is a list of {"input", "output"} for standard input and output,
            or with an "entry", lines of JSON for the arguments of that method of ``Solution`` or function.
    """
    code = code_of(answer)
    if program["kind"] == "asserts":
        is_function = re.search(rf"^\s*(async\s+)?def\s+{re.escape(program['entry'])}\b", code, re.MULTILINE)
        imports = "\n".join(re.findall(r"^(?:import|from)\s.*$", program["begun"], re.MULTILINE))
        head = f"{imports}\n" if is_function else program["begun"]
        return passes_tests(f"{head}{code}\n\n{program['tests']}")
    entry = program["entry"]
    if entry is None:
        return all(_same_output(run_python(code, case["input"]), case["output"]) for case in program["tests"])
    called = f"Solution().{entry}" if re.search(r"^class\s+Solution\b", code, re.MULTILINE) else entry
    prelude = "from typing import *\nfrom collections import *\nimport math, heapq, bisect, itertools, functools, re\n"
    calls = [_CALL.format(case=json.dumps(case), entry=called) for case in program["tests"]]
    return all(passes_tests(f"{prelude}{code}{call}") for call in calls)


def passes_tests(tested: str) -> bool:
    """Run code that ends with its tests, and return whether it comes to their end: it may also end itself before."""
    sentinel = secrets.token_hex(16)
    succeeded, output = run_python(f"{tested}\nprint('\\n{sentinel}')\n")
    return succeeded and output.rstrip().endswith(sentinel)


def _same_output(result: tuple[bool, str], expected: str) -> bool:
    """Compare line by line, without blanks at the ends of lines and text."""
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (result[1], expected)]
    return result[0] and lines[0] == lines[1]


def run_python(code: str, standard_input: str = "") -> tuple[bool, str]:
    """Return whether the program ended without an error, and what it wrote.

    It runs in an empty directory, without this process's environment, in a session that is killed as a whole.
    """
    if "\0" in code:  # Python 3.10 takes it for the end of the program
        return False, ""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as directory:
        program, output = Path(scratch) / "program.py", Path(scratch) / "output"  # a command line has a limit
        program.write_text(code, "utf-8", "replace")
        with output.open("wb") as file:  # RLIMIT_FSIZE limits its size
            process = subprocess.Popen(
                [sys.executable, "-I", str(program)], cwd=directory, env={}, start_new_session=True, preexec_fn=_limit,
                stdin=subprocess.PIPE, stdout=file, stderr=subprocess.DEVNULL, text=True, errors="replace",
            )  # fmt: skip
            try:
                process.communicate(standard_input, timeout=SECONDS)
                succeeded = process.returncode == 0
            except subprocess.TimeoutExpired:
                succeeded = False
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        return succeeded, output.read_text("utf-8", "replace") if succeeded else ""


def _limit() -> None:
    for resource_type, limit in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, WRITTEN),
        (resource.RLIMIT_CPU, int(SECONDS) + 1),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(resource_type, (limit, limit))
