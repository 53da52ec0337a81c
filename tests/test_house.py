"""Who imports whom: the algorithm knows no processor, and maths needs no models."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGES = ["fsd_core", "fsd_infer", "fsd_bench", "fsd_train"]
LOADERS = {
    f"fsd_infer/{name}.py" for name in ("cli/commands", "cli/env", "decoder/fuzzy", "decoder/requests", "environment")
}
SEEN_BY_BACKENDS = {f"fsd_infer.{name}" for name in ("device.cache", "device.cores", "device.cpuinfo", "device.memory")}
SEEN_BY_BACKENDS |= {f"fsd_infer.targets.{name}" for name in ("masks", "stack", "weights")}
PURE = ["fsd_core.divergence", "fsd_core.functional", "fsd_core.sampling", "fsd_infer.trees.tree", "fsd_infer.rules"]
MODELS = ["transformers", "huggingface_hub", "fsd_infer.targets"]
HEAVY = [*MODELS, "safetensors", "fsd_infer.backends.cpu.build"]


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


@cache
def imports_of(file: Path) -> list[str]:
    """Every module and every name that a file imports, wherever in it."""
    return list(_imports_of(file))


def _imports_of(file: Path) -> Iterator[str]:
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_algorithm_knows_no_processor(repo_root: Path) -> None:
    """Backends are chosen where a decoder is loaded and where a machine is reported on, and see little of the rest."""
    files = [file for package in PACKAGES for file in (repo_root / package).rglob("*.py")]
    assert len(files) > 100
    users, seen = set(), set()
    for file in files:
        own = file.relative_to(repo_root)
        inside = own.parts[:2] == ("fsd_infer", "backends")
        for name in imports_of(file):
            if not inside and f"{name}.".startswith("fsd_infer.backends."):
                users.add(str(own))
            elif inside and name.startswith("fsd_infer.") and not name.startswith("fsd_infer.backends."):
                seen.add(".".join(name.split(".")[:3]))
    assert users <= LOADERS and "fsd_infer/decoder/fuzzy.py" in users
    assert seen <= SEEN_BY_BACKENDS


def test_packages_know_only_those_to_their_left(repo_root: Path) -> None:
    for place, package in enumerate(PACKAGES):
        files = list((repo_root / package).rglob("*.py"))
        theirs = {name.partition(".")[0] for file in files for name in imports_of(file)} & {*PACKAGES}
        assert len(files) > 10 and theirs <= {*PACKAGES[: place + 1]}, package


def modules_of(repo_root: Path, packages: list[str]) -> dict[str, Path]:
    files = [file for package in packages for file in (repo_root / package).rglob("*.py")]
    return {".".join(file.relative_to(repo_root).with_suffix("").parts): file for file in files}


def rings(left: dict[str, set[str]]) -> set[str]:
    """Who is left when those that stand on nobody are taken away, again and again."""
    while ground := [name for name, seen in left.items() if not seen & left.keys()]:
        left = {name: seen for name, seen in left.items() if name not in ground}
    return set(left)


def home_of(name: str, files: dict[str, Path]) -> str | None:
    """The module of ours that defines an imported name, through the pages of packages that hand names on."""
    if name in files:
        return name
    module, _, last = name.rpartition(".")
    page = f"{module}.__init__"
    if module in files or page not in files:
        return module if module in files else None
    handed = (home for home in imports_of(files[page]) if home.endswith(f".{last}"))
    return next((found for home in handed if (found := home_of(home, files))), None)


def test_no_files_import_each_other_in_a_ring(repo_root: Path) -> None:
    """Also not for types alone: what names each other is one thing, or one of the two does not need the other."""
    files = modules_of(repo_root, PACKAGES)
    seen = {
        module: {home for name in imports_of(file) if (home := home_of(name, files))} - {module}
        for module, file in files.items()
        if file.name != "__init__.py"
    }
    assert sum(map(len, seen.values())) > 500
    assert not rings(seen), "they import each other, or stand on such files"


def test_rooms_of_the_decoder_form_no_ring_and_know_few_others(repo_root: Path) -> None:
    """A room is a folder of fsd_infer, or a file beside them."""
    files = modules_of(repo_root, ["fsd_infer"])
    rooms: dict[str, set[str]] = {}
    for place, file in files.items():
        homes = {
            found
            for name in imports_of(file)
            for found in (name, name.rpartition(".")[0])
            if found.startswith("fsd_infer.")
        }
        own = place.split(".")[1]
        rooms.setdefault(own, set()).update(
            {home.split(".")[1] for home in homes} & {name.split(".")[1] for name in files} - {own}
        )
    assert len(rooms) > 10 and 50 < sum(map(len, rooms.values())) <= 59
    assert not rings(rooms), "they know each other, or stand on such rooms"


def test_no_class_name_is_taken_twice(repo_root: Path) -> None:
    files = [file for package in [*PACKAGES, "benchmarks"] for file in (repo_root / package).rglob("*.py")]
    names = Counter(node.name for file in files for node in nodes_of(file) if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()


def test_maths_needs_no_models_and_no_compiler(repo_root: Path) -> None:
    """The package's own page, which offers everything, is left out. What a divergence imports when it is first asked
    for neither finds nor downloads models.
    """
    code = f"""
import importlib, sys, types
package = types.ModuleType("fsd_infer")
package.__path__ = [{str(repo_root / "fsd_infer")!r}]
sys.modules["fsd_infer"] = package
for module in {PURE!r}:
    importlib.import_module(module)
print([name for name in {HEAVY!r} if name in sys.modules])
import torch
sys.modules["fsd_core.divergence"].divergence("js")(torch.ones(3), torch.ones(3))
print([name for name in {MODELS!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]


def test_drafters_see_shapes_and_no_policy(repo_root: Path) -> None:
    """A shape carries the prices by which a drafter grows its tree. It cannot see what rounds cost, nor who chooses."""
    files = (repo_root / "fsd_infer" / "drafters").rglob("*.py")
    names = {name.split(".")[2] for file in files for name in imports_of(file) if name.startswith("fsd_infer.trees.")}
    assert names == {"priced_growth", "prices", "shape", "tree"}


def test_no_exception_is_raised_as_its_own_cause(repo_root: Path) -> None:
    """``raise A if ... else B from error`` is ``raise (A if ... else B) from error``, and A may be the error itself."""
    files = [file for package in PACKAGES for file in (repo_root / package).rglob("*.py")]
    found = [
        f"{file.relative_to(repo_root)}:{node.lineno}"
        for file in files
        for node in nodes_of(file)
        if isinstance(node, ast.Raise) and node.cause is not None and isinstance(node.exc, (ast.IfExp, ast.BoolOp))
    ]
    assert not found
