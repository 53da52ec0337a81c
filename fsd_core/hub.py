"""The Hub's client, as loading uses it: waits have bounds, files are whole, and each error is one line.

The client is huggingface_hub's, so tokens, cache, ``HF_ENDPOINT`` and offline mode work as usual.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from huggingface_hub import constants, get_session
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import hf_raise_for_status

from fsd_core.errors import FsdError, ModelLoadError, shortened
from fsd_core.files import HUB_ID, open_safetensors, sha256_of
from fsd_core.registry import did_you_mean

logger = logging.getLogger(__name__)

TRIES = 3  # of a request that is answered by errors
WAIT = 30  # most seconds that the Hub may ask to wait
ANSWER = 10.0  # seconds for an answer without a file's content
RECEIPT = 120.0  # seconds for the answer to an upload, or between two parts of a file, where the client has no bound
LARGE = 1 << 26  # bytes of a file that is hashed when it comes, and later checked only by its header
_sessions: Any = import_module(get_session.__module__)
# httpx, or what the client has in its place
_http: Any = import_module(HTTPError.__module__.partition(".")[0])
_NAME = re.compile(r"\w[\w.+=-]{0,199}", re.ASCII)  # of a file in a folder, which cannot lead out of it
_SHA1, _SHA256 = (re.compile(rf"[0-9a-f]{{{digits}}}").fullmatch for digits in (40, 64))
_REPORTED: set[str] = set()  # repositories for which a log line said that no directory has their name
_NAMES = ("ETag", "X-Linked-ETag", "X-Repo-Commit", "X-Xet-Hash")  # headers that the client uses as such names
_INFO = re.compile(r"/api/(models|datasets)/[^/]+/[^/]+(/revision/.*)?")

Loaded = TypeVar("Loaded")


class HubError(ModelLoadError):
    """The Hub was not reached, or does not give what it was asked for."""


def is_hub_id(name: str) -> bool:
    """Whether this is of the form owner/name, and no path."""
    return HUB_ID.fullmatch(name) is not None and not os.path.exists(name)


def check_mistyped(name: str, **hub: Any) -> None:
    """Raise ModelLoadError for a hub id that looks like a path to a directory here, before the Hub is asked.

    Args:
        name: of the form owner/name.
        hub: options of the client. A ``revision`` says that a repository is meant.
    """
    parent, _, last = name.partition("/")
    if hub.get("revision") or not os.path.isdir(parent) or _folder(name, **hub).exists():
        return
    if hint := did_you_mean(last, os.listdir(parent)):
        raise ModelLoadError(
            f"{name}: no such directory, though {parent} is one.{hint} For a repository of the Hub, name its revision."
        )


def _folder(name: str, **hub: Any) -> Path:
    """Return the folder of a repository in the cache."""
    return Path(hub.get("cache_dir") or constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


# requests ------------------------------------------------------------------------------------------------------------


@contextmanager
def guarded() -> Iterator[None]:
    """Bound the waits of the client within the block, and trust no name that leads out of its cache.

    A host that does not answer is asked once more, and then counts as not there for the rest of the block. Then the
    client uses its cache, or raises an error. An answer that is an error, or that asks to wait long, is tried again
    :data:`TRIES` times at most.
    """
    first: Any = get_session()
    if isinstance(first.send, _Guard):
        yield
        return
    clients, failed, silent = [], Counter[tuple[str, str]](), set[str]()

    def watched(client: Any) -> Any:
        client.send = _Guard(client.send, failed, silent)
        clients.append(client)
        return client

    factory = _sessions._GLOBAL_CLIENT_FACTORY
    watched(first)
    _sessions._GLOBAL_CLIENT_FACTORY = lambda: watched(factory())  # huggingface_hub makes another after some errors
    try:
        yield
    finally:
        _sessions._GLOBAL_CLIENT_FACTORY = factory
        for client in clients:
            vars(client).pop("send", None)


class _Guard:
    """The ``send`` of an HTTP client, guarded.

    Args:
        send: as the client has it.
        failed: how often requests failed, by method and address.
        silent: hosts that do not answer.
    """

    def __init__(self, send: Callable[..., Any], failed: Counter[tuple[str, str]], silent: set[str]) -> None:
        self.send, self.failed, self.silent = send, failed, silent

    def __call__(self, request: Any, **options: Any) -> Any:
        host, path, streamed = request.url.host, unquote(request.url.path), bool(options.get("stream"))
        if ".." in path.split("/") or "//" in path.partition("/resolve/")[2]:
            raise HubError(f"{host} names {path!r:.120}, which leads out of a repository: it is not fetched.")
        # parts of a file that is read over hours are left to their reader's own retries
        asks = request.method in ("GET", "HEAD") and not streamed and "range" not in request.headers
        bound = max(ANSWER, constants.HF_HUB_ETAG_TIMEOUT) if asks else RECEIPT
        limits = request.extensions.get("timeout") or dict.fromkeys(("connect", "read", "write", "pool"))
        limits = {part: min(value or bound, bound) for part, value in limits.items()}
        request.extensions = {**request.extensions, "timeout": limits}
        response = self._asked(request, options, host) if asks else self.send(request, **options)
        self._check_status(request, response)
        if request.method == "HEAD" or _INFO.fullmatch(path):
            self._check_names(host, response)
        return response

    def _asked(self, request: Any, options: dict[str, Any], host: str, is_last: bool = False) -> Any:
        """Return the answer to a request that may be repeated, once."""
        if host in self.silent:
            raise OfflineModeIsEnabled(f"{host} does not answer")
        try:
            return self.send(request, **options)
        except _http.ProxyError:
            raise
        except _http.TransportError as error:
            reason = shortened(error, 120)
        if not is_last:
            time.sleep(1)
            return self._asked(request, options, host, is_last=True)
        self.silent.add(host)
        logger.warning("%s does not answer (%s): only the cache is used.", host, reason)
        raise OfflineModeIsEnabled(f"{host} does not answer: {reason}")

    def _check_status(self, request: Any, response: Any) -> None:
        """Raise what the client would raise after more and longer waits."""
        key = request.method, str(request.url)
        if response.status_code < 500 and response.status_code not in (408, 429):
            self.failed.pop(key, None)
            return
        self.failed[key] += 1
        retry_after = response.headers.get("Retry-After", "")
        if not re.fullmatch(r"\d{1,9}", retry_after, re.ASCII):  # the client takes other digits for a number
            response.headers.pop("Retry-After", None)
        if self.failed[key] >= TRIES or (wait_of(response) or 0) > WAIT:
            response.read()
            hf_raise_for_status(response)

    def _check_names(self, host: str, response: Any) -> None:
        """Raise HubError for a header or a commit that would become a path outside the cache."""
        headers = {name: response.headers.get(name) for name in _NAMES}
        if response.request.method == "GET" and response.status_code == 200:
            answer = response.json()
            headers["sha"] = answer.get("sha") if isinstance(answer, dict) else None
        for name, value in headers.items():
            if value is not None and not _NAME.fullmatch(str(value).removeprefix("W/").strip('"')):
                raise HubError(
                    f"{host} answers with the {name} {str(value)!r:.80}, which is not the name of a file: nothing is "
                    "fetched from it. Check HF_ENDPOINT."
                )


def wait_of(response: Any) -> int | None:
    """Return the seconds that an answer asks to wait; None if it does not say."""
    match = re.fullmatch(r"\d{1,9}", response.headers.get("Retry-After", ""), re.ASCII)
    limited = re.search(r"\bt\s*=\s*(\d{1,9})", response.headers.get("RateLimit", ""), re.ASCII)
    if response.status_code == 429 and limited is not None:
        return int(limited[1])
    return int(match[0]) if match else None


# errors --------------------------------------------------------------------------------------------------------------


@contextmanager
def hub_errors(repository: str, revision: str | None = None) -> Iterator[None]:
    """Guard the client, and convert its errors to a HubError of one line that names the repository and the fix."""
    try:
        with guarded():
            yield
    except FsdError:
        raise
    except Exception as error:
        fault = hub_fault(error, revision)
        if isinstance(fault, FsdError):
            raise fault from error
        fault = fault or f"was not read or written ({shortened(error, 200)}): try again."
        raise HubError(f"{repository} {fault}") from error


def hub_fault(error: BaseException, revision: str | None = None) -> str | FsdError | None:
    """Return what the Hub's part in an error is: the rest of a sentence about the repository, or an error of ours.

    None if no error of the client caused it.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"does not fit on the disk ({cause}): free some space, or set HF_HOME to another disk."
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    for kind, message in _FAULTS:
        for link in chain:
            if isinstance(link, kind) and (kind is not HfHubHTTPError or not isinstance(link, EntryNotFoundError)):
                reason = shortened(chain[-1] if link.__cause__ else link, 200)
                return link if isinstance(link, HubError) else message(link).format(revision=revision, reason=reason)
    return None


def _refusal(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status == 404:
        return "is not on the Hub (status 404): check the name and HF_ENDPOINT."
    if status == 429:
        wait = wait_of(error.response)
        asks = "" if wait is None else f", it asks to wait {wait} seconds"
        return f"is not given by the Hub, which gets too many requests (status 429{asks}): wait, or log in for more."
    if status >= 500:
        return f"is not given by the Hub, which fails (status {status}): try again later."
    return f"is refused by the Hub (status {status}): log in with `hf auth login`, or give a token with access."


_UNREACHED = (
    "is not a directory, not in the cache, and the Hub was not reached ({reason}): check the name, the connection and "
    "HF_ENDPOINT, or unset HF_HUB_OFFLINE."
)
# Errors of the client, more specific ones first, and our messages.
_FAULTS: list[tuple[type[BaseException], Callable[[Any], str]]] = [
    (HubError, str),
    (GatedRepoError, lambda _: "is gated: accept its terms on its page, and log in with `hf auth login` or give a "
     "token."),
    (RevisionNotFoundError, lambda _: "has no revision {revision!r}: give one of its branches or tags."),
    (RepositoryNotFoundError, lambda _: "is neither a directory nor a repository of the Hub that you may read: check "
     "the name, and for a private one log in with `hf auth login` or give a token."),
    (HfHubHTTPError, _refusal),
    (LocalEntryNotFoundError, lambda _: _UNREACHED),
    (OfflineModeIsEnabled, lambda _: _UNREACHED),
    (_http.TransportError, lambda _: "was not transferred whole, the connection broke or stalled ({reason}): try "
     "again."),
]  # fmt: skip


# contents ------------------------------------------------------------------------------------------------------------


def load_whole(source: str | os.PathLike[str], load: Callable[[], Loaded], **hub: Any) -> Loaded:
    """Call ``load``, which loads ``source``; if files of it in the Hub's cache are damaged, fetch them once more.

    The client names a file in its cache by the hash of its content where the Hub tells it. Files that came within the
    call are compared with it, those that were there if the call fails.

    Args:
        source: a hub id. For anything else, ``load`` is called and nothing else happens.
        load: may be called twice.
        hub: options of the client; ``cache_dir`` and ``local_files_only`` are used.

    Raises:
        HubError: the files are damaged and cannot be fetched, or come damaged.
        FsdError: any error of ``load`` that is not the files' fault.
    """
    name = os.fspath(source)
    if not isinstance(name, str) or not is_hub_id(name):
        return load()
    folder = _folder(name, **hub)
    if not folder.exists() and name not in _REPORTED:
        _REPORTED.add(name)
        print(f"[{name}] no directory here, nothing in the cache: asking the Hub", file=sys.stderr, flush=True)
    known = set(_blobs(folder))
    with guarded():
        try:
            result = load()
        except HubError:
            raise
        except FsdError as error:
            damaged = [blob for blob in _blobs(folder) if is_damaged(blob)]
            if not damaged:
                raise _hinted(error, folder) from error
        else:
            damaged = _received(folder, known)
            if not damaged:
                return result
        if hub.get("local_files_only") or constants.is_offline_mode():
            raise HubError(f"{name} is damaged in the cache, and cannot be fetched offline. {_advice(folder)}")
        print(f"[{name}] {len(damaged)} files in the cache are damaged: fetching again", file=sys.stderr, flush=True)
        for blob in damaged:
            blob.unlink()
        try:
            result = load()
        except HubError:
            raise
        except FsdError as error:
            raise type(error)(f"{error} Damaged files were fetched once more. {_advice(folder)}") from error
        if again := _received(folder, known - set(damaged)):
            for blob in again:
                blob.unlink()
            raise HubError(f"{name} comes from the Hub with other content than its hash says, twice: try again later.")
        return result


def _received(folder: Path, known: set[Path]) -> list[Path]:
    """Return the large files that came since ``known`` were there and are not what the Hub says."""
    return [blob for blob in _blobs(folder) if blob not in known and _SHA256(blob.name) and is_damaged(blob, True)]


def is_damaged(blob: Path, whole: bool = False) -> bool:
    """Return whether a file of the cache is not what its name says; False if the name is no hash.

    Args:
        blob: named by the SHA-256 of a large file, or by git's SHA-1 of a small one.
        whole: whether to hash a large file, too, which takes a second per gigabyte.
    """
    size = blob.stat().st_size
    if _SHA1(blob.name):
        return hashlib.sha1(b"blob %d\0" % size + blob.read_bytes()).hexdigest() != blob.name
    if not _SHA256(blob.name):
        return False
    if whole or size <= LARGE:
        return sha256_of(blob) != blob.name
    try:
        with open_safetensors(blob, ""):
            return False
    except FsdError:
        return True


def _blobs(folder: Path) -> list[Path]:
    """Return the files of a repository in the cache, by the names that the client gave them."""
    return [blob for blob in folder.glob("blobs/*") if blob.is_file() and blob.suffix != ".incomplete"]


def _hinted(error: FsdError, folder: Path) -> FsdError:
    """Return the error of files that may be damaged, with what to do then, if their names do not tell."""
    names = {file.resolve().name for file in folder.glob("snapshots/*/**/*.*")}
    if all(_SHA1(name) or _SHA256(name) for name in names):
        return error
    return type(error)(f"{error} If its files are damaged, d{_advice(folder)[1:]}")


def _advice(folder: Path) -> str:
    return f"Delete the folder {folder}, or load it once with force_download=True."
