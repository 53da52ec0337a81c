"""What can go wrong with the Hub and with its cache: said truly, in one line and soon; what is damaged comes again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, get_session

from fsd_core.hub import LARGE, is_damaged
from fsd_core.text.rows import read_rows, rows_digest
from fsd_infer import FsdError, Target
from fsd_infer.drafters.corpus import open_corpus
from fsd_infer.heads.head import EagleHead
from fsd_infer.heads.hub import find_head
from fsd_infer.targets.loading import load_config, load_target, load_tokenizer
from tests.bench_toys import Toy
from tests.families import tiny_model
from tests.fuzzing import one_line
from tests.loopback_hub import Hub, Repository, loopback_hub
from tests.test_head_formats import LAYERS, make_head

Load = Callable[[str], Any]
LOADS: dict[str, Load] = {
    "head": EagleHead.from_pretrained, "config": load_config, "tokenizer": load_tokenizer,
    "target": lambda name: load_target(name, dtype=torch.float32, device="cpu"),
    "rows": lambda name: list(read_rows(f"hf:{name}")), "digest": lambda name: rows_digest(f"hf:{name}"),
}  # fmt: skip


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits of the client and ours, which end at once."""
    found: list[float] = []
    monkeypatch.setattr("time.sleep", found.append)
    return found


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy: Toy) -> Iterator[Hub]:
    """With a head, a causal LM and a dataset, each owner/one."""
    head = make_head(Target(tiny_model("llama", num_hidden_layers=LAYERS)), None, layout="fsd")
    head.save_pretrained(tmp_path / "head")
    with loopback_hub() as served:
        served.serve_this_process(monkeypatch, tmp_path / "cache")
        served.serve_datasets(monkeypatch, tmp_path / "datasets")
        served.add("owner/one", toy.target)
        served.add("owner/head", tmp_path / "head")
        served.add("owner/one", {"train.jsonl": b'{"text": "the cat sat"}\n'}, kind="datasets")
        yield served


def everything(hub: Hub) -> list[Repository]:
    return list(hub.repositories.values())


def said(load: Load, name: str) -> str:
    with pytest.raises(FsdError) as raised:
        load(name)
    one_line(str(raised.value))
    assert name in str(raised.value).replace("models--", "").replace("--", "/")
    return str(raised.value)


FAULTS = [
    ("401 GatedRepo", "is gated: accept its terms"),
    ("401 RepoNotFound", "neither a directory nor a repository of the Hub that you may read"),
    ("403 Forbidden", "is refused by the Hub (status 403): log in"),
    ("404 Lost", "is not on the Hub (status 404): check the name"),
    ("429 Busy", "which gets too many requests (status 429): wait, or log in"),
    ("500 Broken", "which fails (status 500): try again later"),
    ("503 Busy", "which fails (status 503): try again later"),
]


# each status of both clients, ours and that of `datasets`, and each way to load with the last
STATUSES = [(kind, *fault) for kind in LOADS for fault in (FAULTS if kind in ("head", "rows") else FAULTS[-1:])]


@pytest.mark.parametrize(("kind", "fault", "words"), STATUSES)
def test_each_status_is_told_truly(kind: str, fault: str, words: str, hub: Hub, waits: list[float]) -> None:
    if kind in ("rows", "digest") and fault.endswith("Lost"):
        words = "hf:owner/one"  # `datasets` says in its own words that there is no such dataset
    for repository in everything(hub):
        repository.fault = fault
    assert words in said(LOADS[kind], "owner/one")
    assert sum(waits) < 10 and len(hub.asked) < 20


@pytest.mark.parametrize("header", ["Retry_After", "RateLimit"])
def test_no_long_wait_is_obeyed(header: str, hub: Hub, waits: list[float]) -> None:
    values = {"Retry_After": "100000", "RateLimit": '"api";r=0;t=100000'}
    for repository in everything(hub):
        repository.fault, repository.headers = "429 Busy", {header: values[header]}
    for kind in ("head", "target", "rows"):
        assert "status 429" in (text := said(LOADS[kind], "owner/one"))
        assert "asks to wait 100000 seconds" in text and not waits
    for odd in ("\xb2", "-5", "soon", "9" * 5000):  # no numbers, though the client takes the first for one
        everything(hub)[0].headers = {"Retry_After": odd}
        assert "status 429" in said(load_config, "owner/one")


def test_a_short_wait_is_obeyed_and_the_cache_is_used(hub: Hub, waits: list[float]) -> None:
    wanted = load_config("owner/one").to_dict()
    everything(hub)[0].fault, everything(hub)[0].headers = "503 Busy", {"Retry_After": "7"}
    assert load_config("owner/one").to_dict() == wanted
    assert set(waits) <= {8.0}  # the client adds a second


@pytest.mark.parametrize("kind", LOADS)
def test_a_hub_that_is_not_there(
    kind: str, hub: Hub, waits: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """As for a mistyped directory: said before the Hub is asked, and soon after."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        hub.url = f"http://127.0.0.1:{free.getsockname()[1]}"
    hub.serve_this_process(monkeypatch, tmp_path / "empty")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
    monkeypatch.setattr("fsd_core.hub._REPORTED", set())
    text = said(LOADS[kind], "runs/mytarget")
    assert sum(waits) < 5
    if kind in ("rows", "digest"):
        assert "the Hub was not reached" in text
    else:
        assert "runs/mytarget is not a directory, not in the cache, and the Hub was not reached" in text
        assert "[runs/mytarget] no directory here, nothing in the cache: asking the Hub" in capsys.readouterr().err
    assert not hasattr(get_session().send, "silent"), "the client is as it was"


def test_a_mistyped_file_is_not_looked_for_on_the_hub(hub: Hub) -> None:
    assert "no such file" in said(load_config, "models/tiny.gguf") and not hub.asked


@pytest.mark.parametrize("fault", ["cut", "stalls"])
def test_a_download_that_does_not_end(fault: str, hub: Hub, waits: list[float], monkeypatch: Any) -> None:
    """Half of a file comes, and then the connection breaks, or nothing comes for as long as the client waits."""
    for name in ("fsd_core.hub.RECEIPT", "huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(name, 0.2)
    for repository in everything(hub):
        repository.fault = fault
    assert "was not transferred whole, the connection broke or stalled" in said(EagleHead.from_pretrained, "owner/head")


@pytest.mark.parametrize("kind", ["head", "target"])
def test_a_full_disk_is_named(kind: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    assert "does not fit on the disk" in said(LOADS[kind], "owner/one")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "pointer": lambda content: POINTER, "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"", "other": lambda content: b"\xff" * len(content),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "file", "damage"), [
    *(("head", "model.safetensors", damage) for damage in DAMAGES),
    *(("head", "config.json", damage) for damage in ("cut", "other")),
    *(("config", "config.json", damage) for damage in DAMAGES),
    ("target", "tokenizer.json", "pointer"),
    *(("target", "model.safetensors", damage) for damage in ("cut", "other")),
    ("tokenizer", "tokenizer.json", "empty"),
    ("tokenizer", "tokenizer.json", "cut"),
])  # fmt: skip
def test_what_is_damaged_in_the_cache_comes_again(
    kind: str, file: str, damage: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    name = "owner/head" if kind == "head" else "owner/one"
    LOADS[kind](name)
    (cached,) = (tmp_path / "cache").glob(f"models--{name.replace('/', '--')}/snapshots/*/{file}")
    whole = cached.read_bytes()
    cached.resolve().write_bytes(DAMAGES[damage](whole))
    hub.asked.clear()
    LOADS[kind](name)
    assert cached.read_bytes() == whole and hub.fetched() == [file]
    assert f"[{name}] 1 files in the cache are damaged: fetching again" in capsys.readouterr().err
    if damage == "cut":
        cached.resolve().write_bytes(DAMAGES[damage](whole))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert f"Delete the folder {cached.parents[2]}, or load it once with force_download=True" in (
            said(LOADS[kind], name)
        )


def test_files_without_a_hash_are_named_with_the_way_out(hub: Hub, tmp_path: Path) -> None:
    """A mirror may name files as it likes. The option that is named helps."""
    everything(hub)[1].headers = {"ETag": '"v1-NAME"', "X_Linked_ETag": '"v1-NAME"'}
    EagleHead.from_pretrained("owner/head")
    (cached,) = (tmp_path / "cache").glob("models--owner--head/snapshots/*/model.safetensors")
    cached.resolve().write_bytes(POINTER)
    assert f"delete the folder {cached.parents[2]}" in said(EagleHead.from_pretrained, "owner/head")
    EagleHead.from_pretrained("owner/head", force_download=True)


@pytest.mark.parametrize(("kind", "name"), [("head", "owner/head"), ("target", "owner/one")])
def test_large_files_are_compared_with_their_hash(kind: str, name: str, hub: Hub, tmp_path: Path, capsys: Any) -> None:
    """Other bytes, which load as well as the right ones."""
    repository = hub.repositories["models", name]
    repository.swaps = 1
    LOADS[kind](name)
    assert "are damaged: fetching again" in capsys.readouterr().err and repository.swaps == 0
    shutil.rmtree(tmp_path / "cache")
    repository.swaps = 99
    assert "with other content than its hash says" in said(LOADS[kind], name)
    repository.swaps = 0
    LOADS[kind](name)


def test_very_large_files_are_checked_by_their_header(tmp_path: Path) -> None:
    blob = tmp_path / ("0" * 64)
    with blob.open("wb") as file:
        file.truncate(LARGE + 1)
    assert is_damaged(blob) and is_damaged(blob, whole=True)


OUT = "../../../../outside"
NAMES: list[dict[str, Any]] = [
    {"headers": {"ETag": f'"{OUT}"', "X_Linked_ETag": f'"{OUT}"'}}, {"headers": {"ETag": f'W/"{OUT}"'}},
    {"headers": {"X_Linked_ETag": f'"{OUT}"'}}, {"headers": {"X_Repo_Commit": OUT}},
    {"headers": {"X_Xet_Hash": OUT}}, {"headers": {"ETag": '".."'}}, {"headers": {"ETag": '"/tmp/outside"'}},
    {"sha": OUT}, {"headers": {"X_Repo_Commit": OUT}, "fault": "404 EntryNotFound"},
]  # fmt: skip


@pytest.mark.parametrize("change", NAMES, ids=str)
def test_no_name_leads_out_of_the_cache(change: dict[str, Any], hub: Hub, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    for name, value in change.items():
        for repository in everything(hub):
            setattr(repository, name, value)
    for kind, name in (("head", "owner/head"), ("target", "owner/one"), ("config", "owner/one")):
        if "sha" in change:  # nothing but names of revisions is looked up by it, so nothing is lost
            LOADS[kind](name)
        else:
            with pytest.raises(FsdError, match="not the name of a file|no draft head"):
                LOADS[kind](name)
    found = {path for path in tmp_path.rglob("*") if path.name.startswith("outside")}
    assert not found and sorted({*tmp_path.iterdir()} - {tmp_path / "cache", tmp_path / "datasets"}) == before


@pytest.mark.parametrize("absolute", [True, False])
def test_shards_do_not_lead_out_of_the_repository(absolute: bool, hub: Hub, toy: Toy, tmp_path: Path) -> None:
    """Not even of one whose list of files names such a file."""
    shard = f"{tmp_path if absolute else '../../../..'}/outside.safetensors"
    index = json.dumps({"metadata": {}, "weight_map": {"fc.weight": shard}}).encode()
    for load, of in ((find_head, tmp_path / "head"), (LOADS["target"], toy.target)):
        config = (of / "config.json").read_bytes()
        hub.add("owner/shards", {"config.json": config, "model.safetensors.index.json": index, shard: b"x"})
        with pytest.raises(FsdError, match="outside.safetensors|leads out of"):
            load("owner/shards")
    assert not list(tmp_path.rglob("outside*"))


def test_a_corpus_from_the_hub_is_kept_and_used_offline(
    hub: Hub, toy: Toy, tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("FSD_CACHE", str(tmp_path / "fsd"))
    target = Target.from_pretrained(str(toy.target), dtype=torch.float32)
    made = open_corpus("hf:owner/one", target)
    everything(hub)[-1].fault = "500 Broken"
    capsys.readouterr()
    again = open_corpus("hf:owner/one", target)
    assert again.array.tolist() == made.array.tolist()
    assert "drafting from the index of an earlier call" in capsys.readouterr().err
    hub.add("owner/one", {"train.jsonl": b'{"text": "the cat sat"}\n' * 2}, kind="datasets").fault = ""
    assert len(open_corpus("hf:owner/one", target)) == 2 * len(made)
