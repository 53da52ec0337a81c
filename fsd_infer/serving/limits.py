"""How much a request may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(frozen=True)
class Limits:
    """Bounds of requests.

    Attributes:
        max_batch: most answers that the server decodes together.
        max_queue: most answers that wait.
        max_new_tokens: largest length of an answer in tokens.
        max_bytes: largest body of a request.
        seconds: time from a request's arrival until the server cuts its answer off.
    """

    max_batch: int = 8
    max_queue: int = 64
    max_new_tokens: int = 4096
    max_bytes: int = 1 << 20
    seconds: float = 600.0


class BodyLimit:
    """Middleware that refuses bodies of more than ``most`` bytes, whether or not the request states its length."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        count = 0

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.most:
                raise HTTPException(413, f"the request has more than {self.most} bytes. Send a shorter one.")
            return message

        await self.app(scope, counted, send)
