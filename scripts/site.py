"""Hooks of the site (mkdocs.yml): the README as its front page, the API from docstrings, links into the repository.

Pages link to files beside docs/ as the repository shows them. On the site such links go to the repository's address,
FSD_REPOSITORY as in setup.py, or are plain text without it. Pictures of the README are those of docs/figures.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = os.environ.get("FSD_REPOSITORY", "").rstrip("/")
API = {
    "Decode": ["fsd_infer.decoder", "fsd_infer.rules", "fsd_infer.drafters", "fsd_infer.targets.target"],
    "Measure": ["fsd_bench.runner", "fsd_bench.record"],
    "Train": ["fsd_train.models", "fsd_train.losses", "fsd_train.data", "fsd_train.callbacks"],
    "Shared": ["fsd_core.errors", "fsd_core.registry"],
}
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>[~.]?")  # Sphinx's, in docstrings
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/: the front page and the reference."""
    modules = [f"# {part}\n\n" + "\n\n".join(f"::: {name}" for name in names) for part, names in API.items()]
    reference = "\n\n".join(modules).replace("# ", "## ").replace("## ", "# Reference\n\n## ", 1)
    front = (ROOT / "README.md").read_text("utf-8")
    for name, text in (("index.md", _moved(front, "")), ("reference.md", reference)):
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Send links that leave docs/ to the repository."""
    return markdown if page.file.src_uri in ("index.md", "reference.md") else _moved(markdown, "docs")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Show docstrings' names and literal blocks, which are written for Sphinx, as such."""
    return ROLE.sub("<code>", html).replace("::</p>", ":</p>") if page.file.src_uri == "reference.md" else html


def _moved(markdown: str, folder: str) -> str:
    """Return a page of ``folder`` with its links as the site needs them."""

    def moved(found: re.Match[str]) -> str:
        path, hash, anchor = found[3].partition("#")
        named = posixpath.normpath(posixpath.join(folder, path))
        if named == "docs":
            return f"[{found[2]}](index.md)"
        if named.startswith("docs/") and (ROOT / named).exists():
            return f"{found[1]}[{found[2]}]({named.removeprefix('docs/')}{hash}{anchor})"
        if not REPOSITORY:
            return found[2]
        kind = "tree" if (ROOT / named).is_dir() else "blob"
        return f"{found[1]}[{found[2]}]({REPOSITORY}/{kind}/main/{named}{hash}{anchor})"

    return LINK.sub(moved, markdown)
