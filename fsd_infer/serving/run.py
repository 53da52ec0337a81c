"""`fsd-infer serve`: run the application until it is interrupted."""

from __future__ import annotations

import contextlib
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI


class _Server(uvicorn.Server):
    """A server that prints its address when it starts, and ends running answers when it is interrupted."""

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(f"listening on http://{self.config.host}:{self.config.port}/v1, until Ctrl-C", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.config.app.state.batcher.stop()  # type: ignore[union-attr]
        super().handle_exit(sig, frame)


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until the process is interrupted. Running answers are then sent as far as they have come."""
    with contextlib.suppress(KeyboardInterrupt):
        _Server(uvicorn.Config(app, host=host, port=port, log_level="warning")).run()
