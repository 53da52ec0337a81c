"""A small Hub on the loopback that huggingface_hub's own client talks to: models and datasets, downloads and uploads.

Pass its ``url`` as ``HF_ENDPOINT`` to a process, or call :meth:`Hub.serve_this_process` within one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.openai_server import running

_KINDS = "models|datasets"
_INFO = re.compile(rf"/api/({_KINDS})/([^/]+/[^/]+)(?:/revision/(.+))?")
_TREE = re.compile(rf"/api/({_KINDS})/([^/]+/[^/]+)/(?:tree|paths-info)/([^/]+)/?(.*)")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_UPLOAD = re.compile(rf"/api/({_KINDS})/([^/]+/[^/]+)/(preupload|commit)/(.+)")


@dataclass
class Repository:
    """Files by commit, commits by branch or tag; ``fault``: what goes wrong with every request for its files.

    A fault is a status with the word that the Hub puts in a header ("401 GatedRepo"), or "cut": half of a file comes,
    or "stalls": half of it, and then nothing until the hub ends.
    ``headers`` replace those of the answers (NAME: the file's), ``sha`` what the Hub calls the commit, and ``swaps`` is
    how often other bytes come instead of the weights. ``stores``: weights are uploaded apart, before the commit;
    ``refuses``: the method and the end of the path of uploads that go wrong, and how, a status or "cut".
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    fault: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    sha: str = ""
    swaps: int = 0
    stores: bool = False
    refuses: tuple[str, str, str] = ("", "", "")

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        name = hashlib.sha1(json.dumps([revision, len(self.commits)]).encode()).hexdigest()
        self.commits[name] = {**self.commits.get(self.refs.get(revision, ""), {}), **files}
        self.refs[revision] = name
        return name

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        name = self.refs.get(revision, revision)
        return (name, self.commits[name]) if name in self.commits else None


class Hub:
    """Repositories by kind and name. ``asked``: method and path of each request, in order.

    ``token``: what the Hub says of every token, its role or the status of a refusal.
    """

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.asked: list[str] = []
        self.token: str | int = "write"
        self.stored: dict[str, bytes] = {}  # what was uploaded apart, by SHA-256
        self.url = ""
        self.over = threading.Event()

    def add(
        self, name: str, files: Path | dict[str, bytes], revision: str = "main", kind: str = "models"
    ) -> Repository:
        """A repository, or a new commit of one, with these files or those of a directory."""
        if isinstance(files, Path):
            files = {str(path.relative_to(files)): path.read_bytes() for path in files.rglob("*") if path.is_file()}
        repository = self.repositories.setdefault((kind, name), Repository())
        repository.commit(files, revision)
        return repository

    def fetched(self) -> list[str]:
        """The files that were asked for by GET, and forget what was asked."""
        found = [match[4] for line in self.asked if line.startswith("GET") and (match := _FILE.fullmatch(line[4:]))]
        self.asked.clear()
        return found

    def serve_this_process(self, patch: pytest.MonkeyPatch, cache: Path) -> None:
        """Let the client in this process, which read its variables when it was imported, talk to this hub."""
        from huggingface_hub import constants, hf_api

        patch.setattr("transformers.utils.hub._hf_api", None)
        patch.setattr(hf_api.api, "endpoint", self.url)
        patch.setattr(constants, "ENDPOINT", self.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("HF_ENDPOINT", self.url)

    def serve_datasets(self, patch: pytest.MonkeyPatch, cache: Path) -> None:
        """Let the library `datasets`, which has its own copy of these variables, talk to it too."""
        for name, value in {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": False, "HF_DATASETS_CACHE": cache}.items():
            patch.setattr(f"datasets.config.{name}", value)


@contextmanager
def loopback_hub() -> Iterator[Hub]:
    hub = Hub()
    with running(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub
        hub.over.set()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, content: bytes = b"", status: int = 200, cut: str = "", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.wfile.flush()
            self.close_connection = True
        if cut == "stalls":
            self.hub.over.wait(20)

    def refuse(self, status: int, code: str, **headers: str) -> Any:
        self.answer(b"{}", status, X_Error_Code=code, X_Error_Message=code, **headers)

    def json(self, value: Any) -> None:
        self.answer(json.dumps(value).encode(), Content_Type="application/json")

    def found(self, kind: str, name: str, revision: str) -> tuple[Repository, str, dict[str, bytes]] | None:
        repository = self.hub.repositories.get((kind, name))
        if repository is None:
            return self.refuse(404, "RepoNotFound")
        if repository.fault[:1].isdigit():
            status, _, code = repository.fault.partition(" ")
            return self.refuse(int(status), code, **repository.headers)
        state = repository.at(unquote(revision))
        return self.refuse(404, "RevisionNotFound") if state is None else (repository, *state)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if match := _FILE.fullmatch(path):
            found = self.found("datasets" if match[1] else "models", match[2], match[3])
            if found is not None:
                self.send_file(*found, match[4])
        elif match := _TREE.fullmatch(path):
            found = self.found(match[1], match[2], match[3])
            if found is not None:
                self.json([_entry(name, content) for name, content in found[2].items() if name.startswith(match[4])])
        elif path == "/api/whoami-v2":
            if isinstance(self.hub.token, int):
                return self.refuse(self.hub.token, "Refused")
            self.json({"name": "owner", "auth": {"accessToken": {"role": self.hub.token}}})
        elif match := _INFO.fullmatch(path):
            found = self.found(match[1], match[2], match[3] or "main")
            if found is not None:
                files = [{"rfilename": name, "size": len(content)} for name, content in found[2].items()]
                self.json(
                    {"id": match[2], "sha": found[0].sha or found[1], "siblings": files, "private": False, "tags": []}
                )
        else:
            self.refuse(404, "NotFound")

    do_HEAD = do_GET

    def send_file(self, repository: Repository, commit: str, files: dict[str, bytes], name: str) -> None:
        content = files.get(name)
        if content is None:
            return self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        headers: dict[str, Any] = {"ETag": f'"{_git_hash(content)}"', "X_Repo_Commit": commit}
        if name.endswith(".safetensors"):
            headers["X_Linked_ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        headers |= {key: value.replace("NAME", name) for key, value in repository.headers.items()}
        if repository.swaps and self.command == "GET" and name.endswith(".safetensors"):
            repository.swaps -= 1
            content = content[:-8] + bytes(8)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            return self.answer(content, cut="" if name == "config.json" else repository.fault, **headers)
        start, end = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        headers["Content_Range"] = f"bytes {start}-{end}/{len(content)}"
        return self.answer(content[start : end + 1], 206, cut=repository.fault, **headers)

    def fails(self, path: str) -> bool:
        """Whether an upload goes wrong here, which it then has."""
        for repository in self.hub.repositories.values():
            method, end, how = repository.refuses
            if self.command == method and path.endswith(end):
                self.close_connection = True
                if how != "cut":
                    self.refuse(int(how), "Refused")
                return True
        return False

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.asked.append(f"PUT {self.path}")
        if not self.fails(self.path):
            self.hub.stored[hashlib.sha256(content).hexdigest()] = content
            self.answer()

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.fails(path):
            return None
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            to = [{**each, "actions": {"upload": {"href": f"{self.hub.url}/store/{each['oid']}"}}} for each in wanted]
            return self.json({"transfer": "basic", "objects": to})
        if path == "/api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'owner'}/{asked['name']}"
            self.hub.repositories.setdefault((f"{asked.get('type') or 'model'}s", name), Repository()).commit({})
            return self.json({"url": f"{self.hub.url}/{name}", "id": name})
        if match := _TREE.fullmatch(path):
            found = self.found(match[1], match[2], match[3])
            if found is None:
                return None
            wanted = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
            return self.json([_entry(name, content) for name, content in found[2].items() if name in wanted])
        match = _UPLOAD.fullmatch(path)
        if match is None:
            return self.refuse(404, "NotFound")
        found = self.found(match[1], match[2], match[4])
        if found is None:
            return None
        if match[3] == "preupload":
            asked = json.loads(body)["files"]
            kinds = [
                "lfs" if found[0].stores and each["path"].endswith(".safetensors") else "regular" for each in asked
            ]
            modes = [{"uploadMode": kind, "shouldIgnore": False} for kind in kinds]
            return self.json({"files": [{"path": each["path"], **mode} for each, mode in zip(asked, modes)]})
        lines = [json.loads(line) for line in body.splitlines()]
        added = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
        }
        large = [line["value"] for line in lines if line["key"] == "lfsFile"]
        commit = found[0].commit(added | {each["path"]: self.hub.stored[each["oid"]] for each in large}, match[4])
        return self.json({"commitUrl": f"{self.hub.url}/{match[2]}/commit/{commit}", "commitOid": commit})


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": _git_hash(content)}
