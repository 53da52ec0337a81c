"""What a request must pass before its body is read: its Host, its key, and the size of its body."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fsd_core.errors import FsdError

ANY_HOST = "*"
LONGEST = 1000  # characters of an error


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's API has it, with texts of bounded length and only characters that UTF-8 can encode.

    Args:
        status: HTTP status, also the error's code.
        message: what is wrong.
        param: the field that it is about.
    """
    error_type = "server_error" if status >= 500 else "invalid_request_error"
    field = None if param is None else _bounded(param, LONGEST // 10)
    return {"error": {"message": _bounded(message), "type": error_type, "param": field, "code": status}}


def _bounded(text: str, most: int = LONGEST) -> str:
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode()


def error_reply(
    status: int, message: str, headers: dict[str, str] | None = None, param: str | None = None
) -> JSONResponse:
    """Return :func:`error_body` as a reply."""
    return JSONResponse(error_body(status, message, param), status, headers)


def known_hosts(names: Sequence[str]) -> frozenset[str]:
    """Return the names by which clients may reach this machine: these, its own, and any if "*" is among them."""
    hostname = socket.gethostname()
    return frozenset(name.lower().rstrip(".") for name in (*names, hostname, f"{hostname}.local"))


def is_known(host: str, names: frozenset[str]) -> bool:
    """Return whether a Host header names an address, the local host or one of these names.

    A page of another site can make a browser ask this machine under that site's name, once the name resolves to this
    machine. It cannot make it ask under an address or under a name that is not the site's.
    """
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].rstrip(".")
    if ANY_HOST in names or name in names or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return not host  # HTTP/1.0, which no browser speaks
    return True


class Gate:
    """Middleware that refuses requests for a Host of another name, and bodies of more than ``most`` bytes.

    HEAD, by which proxies and monitors check that a server is up, is answered wherever GET is.

    Args:
        app: what answers the others.
        most: bytes of a body, whether or not the request states its length.
        hosts: as returned by :func:`known_hosts`.
    """

    def __init__(self, app: ASGIApp, most: int, hosts: frozenset[str]) -> None:
        self.app, self.most, self.hosts = app, most, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["method"] == "HEAD":  # answered as GET; the server leaves the body out
            scope = {**scope, "method": "GET"}
        host = Headers(scope=scope).get("host", "")
        if not is_known(host, self.hosts):
            text = f"the Host header names {host!r:.80}, which is not this server. Start it with --allow-host NAME."
            return await error_reply(403, text)(scope, receive, send)
        count = 0

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.most:
                raise HTTPException(413, f"the request has more than {self.most} bytes. Send a shorter one.")
            return message

        await self.app(scope, counted, send)


def checked_key(key: str) -> str:
    """Return a key. Raises FsdError for one that no header can carry."""
    if not all("!" <= character <= "~" for character in key):
        raise FsdError(
            "FSD_API_KEY: a header carries ASCII letters, digits and signs, without blanks: choose another key."
        )
    return key


def keyed(api_key: str) -> type[APIRoute]:
    """Return routes that refuse a request with another key before its body is read; an empty key: routes for all.

    Raises:
        FsdError: as for :func:`checked_key`.
    """
    checked_key(api_key)

    class Keyed(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer = super().get_route_handler()

            async def answer_authorised(request: Request) -> Response:
                scheme, _, key = request.headers.get("authorization", "").partition(" ")
                matches = secrets.compare_digest(key.strip().encode(), api_key.encode())
                if api_key and not (matches and scheme.lower() == "bearer"):
                    raise HTTPException(401, "wrong or missing API key.", {"WWW-Authenticate": "Bearer"})
                return await answer(request)

            return answer_authorised

    return Keyed
