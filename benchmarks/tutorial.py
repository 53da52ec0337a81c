"""Time the commands of the tutorial's first two sections, as a newcomer runs them.

    python -m benchmarks.tutorial --json benchmarks/results/tutorial.json

The commands are read from docs/tutorial.md and run one after the other in a new directory that has the repository's
``data``. Times include loading; the target and the compiled kernels are at hand. A command that fails ends the run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.recorded import ROOT, parser_of, record_main
from fsd_core.errors import FsdError
from fsd_core.tables import table

INSTALL = "make install"


def commands_of(page: str) -> list[str]:
    """Return the shell commands of a page's first two sections, without comments and installation."""
    text = "".join(re.split(r"^## ", page, flags=re.M)[1:3])
    lines = "".join(re.findall(r"```bash\n(.*?)```", text, flags=re.S)).replace("\\\n", " ").splitlines()
    return [" ".join(line.split("  #")[0].split()) for line in lines if not line.startswith(INSTALL)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the commands and return the seconds of each. Raises FsdError for one that fails."""
    commands = commands_of((ROOT / "docs" / "tutorial.md").read_text())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment, seconds = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}, {}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "data").symlink_to(ROOT / "data")
        for command in commands:
            print(command, file=sys.stderr)
            start = time.perf_counter()
            if subprocess.run(command, shell=True, cwd=directory, env=environment).returncode:
                raise FsdError(f"`{command}` failed, see above.")
            seconds[command] = time.perf_counter() - start
    return {"seconds": seconds}


def report(record: dict[str, Any]) -> str:
    """Return the times as a table."""
    return table(["command", "minutes"], [[name, f"{seconds / 60:.1f}"] for name, seconds in record["seconds"].items()])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    parser = parser_of("benchmarks.tutorial", __doc__, json=None)
    return record_main("benchmarks.tutorial", parser, measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
