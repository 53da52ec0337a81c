"""A small hub on the loopback, with datasets: what `datasets` asks a hub when it streams one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


def _handler(files: dict[str, dict[str, bytes]], asked: list[str]) -> type[BaseHTTPRequestHandler]:
    """``files``: of each repository the content by path; those of revision v1 begin with "v1:"."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def _reply(self, body: Any, status: int = 200, **headers: str) -> None:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            sent = {
                "Content-Length": str(len(raw)),
                **{name.replace("_", "-"): value for name, value in headers.items()},
            }
            for name, value in sent.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(raw)

        def _files(self, repository: str, revision: str) -> dict[str, bytes] | None:
            known = files.get(repository)
            names = {name for name, commit in COMMITS.items() if revision in (name, commit)}
            if known is None or not names:
                what = "RepoNotFound" if known is None else "RevisionNotFound"
                self._reply({"error": "not found"}, 404, X_Error_Code=what, X_Error_Message="not found")
                return None
            old = "v1" in names
            return {path.removeprefix("v1:"): raw for path, raw in known.items() if path.startswith("v1:") is old}

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            asked.append(f"{self.command} {path}")
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            parts = path.split("/")
            if parts[:2] == ["api", "datasets"] and len(parts) >= 4:
                repository, what = "/".join(parts[2:4]), parts[4] if len(parts) > 4 else "revision"
                revision = parts[5] if len(parts) > 5 else "main"
                found = self._files(repository, revision)
                if found is None:
                    return
                rows = [
                    {"type": "file", "path": name, "size": len(raw), "oid": "0" * 40} for name, raw in found.items()
                ]
                if what == "revision":
                    sha = COMMITS.get(revision, revision)
                    facts = {"id": repository, "sha": sha, "private": False, "gated": False, "disabled": False}
                    siblings = [{"rfilename": name} for name in found]
                    self._reply({**facts, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings})
                elif what == "tree":
                    inside = "/".join(parts[6:])
                    self._reply([row for row in rows if row["path"].startswith(inside)])
                elif what == "paths-info":
                    fields = json.loads(body) if body[:1] == b"{" else parse_qs(body.decode())
                    self._reply([row for row in rows if row["path"] in fields["paths"]])
                else:
                    self._reply({"error": "unknown"}, 404)
            elif parts[0] == "datasets" and parts[3:4] == ["resolve"]:
                found = self._files("/".join(parts[1:3]), parts[4])
                if found is None:
                    return
                raw = found.get("/".join(parts[5:]))
                if raw is None:
                    self._reply({"error": "no file"}, 404, X_Error_Code="EntryNotFound")
                    return
                commit = COMMITS.get(parts[4], parts[4])
                self._reply(raw, ETag=f'"{hash(raw) & 0xFFFF:x}"', X_Repo_Commit=commit, Accept_Ranges="none")
            else:
                self._reply({"error": "unknown"}, 404)

        do_GET = do_HEAD = do_POST = _answer

    return Handler


@contextmanager
def hub(files: dict[str, dict[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Its address, and what it was asked so far."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(files, asked))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
