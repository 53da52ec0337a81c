"""Listening: connections with time limits, and an end that does not wait for clients."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from fsd_core.errors import FsdError

REQUEST_SECONDS = 30.0  # until a connection's request must be complete
READ_SECONDS = 60.0  # until a client that does not read its answer is cut off
GRACE_SECONDS = 5  # for running answers once the server is asked to stop


class Connection(H11Protocol):
    """A connection that ends if its request is not complete in time, or its client does not read the answer."""

    request_seconds, read_seconds = REQUEST_SECONDS, READ_SECONDS
    _late: asyncio.TimerHandle | None = None  # runs while a request comes
    _unread: asyncio.TimerHandle | None = None  # runs while an answer waits to be read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        self._expect()
        super().data_received(data)
        self._expect_no_more()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_coming():  # what remains of a body that was not read, or another request
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End now if no whole request has come, else after its answer."""
        if self._is_coming():
            self.transport.close()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        self._unread = self.loop.call_later(self.read_seconds, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def _is_coming(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def _expect(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.request_seconds, self._refuse_late)

    def _expect_no_more(self) -> None:
        if self._late is not None and self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):  # it came whole
            self._late.cancel()
            self._late = None

    def _refuse_late(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = f"the request was not complete within {self.request_seconds:g} seconds.".encode()
            headers = [("content-type", "text/plain"), ("content-length", str(len(body))), ("connection", "close")]
            for part in (h11.Response(status_code=408, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()


class _Server(uvicorn.Server):
    """A server that prints its address when it starts, and ends running answers when it is interrupted."""

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            print(f"listening on http://{self.config.host}:{port}/v1, until Ctrl-C", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server. uvicorn's own handler would also end the process with the signal's status."""
        self.config.app.state.batcher.stop()  # type: ignore[union-attr]
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True


# of an address that this machine lacks: many names have an IPv6 address as well as an IPv4 one
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def check_free(host: str, port: int) -> None:
    """Raise FsdError if nothing can listen there, before models are loaded; port 0: any free one."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise FsdError(f"--host {host!r:.80} has no address ({error}): give an address of this machine.") from error
    failures = []
    for family, kind, _, _, address in addresses:
        try:
            with socket.socket(family, kind) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server's, after one that ended
                tried.bind(address)
        except OSError as error:
            failures.append(error)
    failures = [error for error in failures if len(failures) == len(addresses) or error.errno not in _ABSENT]
    if failures:
        failed = failures[0]
        advice = {
            errno.EADDRINUSE: "another program listens there: stop it, or give another --port",
            errno.EACCES: "this user may not listen there: give a --port from 1024 on",
            errno.EADDRNOTAVAIL: "give an address of this machine as --host",
        }.get(failed.errno or 0, "give another --host or --port")
        raise FsdError(f"cannot listen on {host}:{port} ({failed.strerror}): {advice}.") from failed


def server(app: FastAPI, host: str, port: int) -> uvicorn.Server:
    """Return a server that does not listen yet; port 0: any free one."""
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", http=Connection, ws="none",
        timeout_graceful_shutdown=GRACE_SECONDS,
    )  # fmt: skip
    return _Server(config)


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until the process is interrupted. Running answers are then sent as far as they are done."""
    running = server(app, host, port)
    is_main = threading.current_thread() is threading.main_thread()
    former = signal.getsignal(signal.SIGHUP)
    takes_hangup = is_main and former is not signal.SIG_IGN  # uvicorn takes the others; nohup ignores it
    if takes_hangup:
        signal.signal(signal.SIGHUP, running.handle_exit)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            running.run()
    finally:
        if takes_hangup:
            signal.signal(signal.SIGHUP, former)
