"""Long sentences are found in pages, recipes' comments and docstrings, and nowhere else."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from scripts.prose import main, prose

LONG = "so " * 31
PAGE = f"""
# A title that ends no sentence

Short, e.g. this `one span` of [a link]({LONG.replace(" ", "-")}). This one is
{LONG}long. Short again.

| a table | {LONG} |

- an item
- {LONG}

```python
{LONG}
```
"""
MODULE = f'''
"""Say something, with code:

    {LONG}

The end.
"""

def say(what: str) -> str:
    """Return it.

    Args:
        what: words; {"so " * 20}
        other: words; {"so " * 20}
            {"so " * 20}
    """
    return "{LONG}"
'''


def test_long_sentences_are_found_in_prose_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("docs/page.md", PAGE), ("fsd_infer/say.py", MODULE), ("recipes/one.yaml", f"a: 1  # {LONG}\n")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    long = [(group, sentence.where) for group, sentence in prose(tmp_path) if sentence.words > 30]
    assert long == [
        ("docs", "docs/page.md:4"),
        ("docs", "docs/page.md:10"),
        ("recipes", "recipes/one.yaml:1"),
        ("fsd_infer", "fsd_infer/say.py:14"),
    ]
    assert main(["--root", str(tmp_path), "--max-share", "0.3"]) == 1
    printed = capsys.readouterr()
    assert "docs" in printed.err and "fsd_infer" not in printed.err and "  42 fsd_infer/say.py:14: other" in printed.out
    assert main(["--root", str(tmp_path), "--max-share", "0.4"]) == 0
    assert main(["--root", str(tmp_path), "--max-share", "0.3", "--hold", "fsd_infer"]) == 0
