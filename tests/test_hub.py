"""Heads and datasets come from a Hub, heads go to one; nothing else is fetched, and each fault is one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants

from fsd_core.errors import CheckpointError, DataError, FsdError
from fsd_core.text.conversations import row_conversation, row_messages
from fsd_core.text.rows import read_rows, rows_digest
from fsd_infer import Target
from fsd_infer.decoder import load_drafter
from fsd_infer.drafters import EagleDrafter, LMDrafter
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_train.cli import main as cli
from fsd_train.commands import publish as publishing
from tests.bench_toys import Toy
from tests.families import VOCAB, options_of
from tests.fuzzing import called, one_line
from tests.loopback_hub import Hub, loopback_hub
from tests.test_head_formats import target as target  # a fixture
from tests.test_head_malformed import heads as heads  # a fixture

OTHERS = {
    "README.md": b"# a head", "pytorch_model.bin": b"junk", "optimizer.pt": b"junk", "old/model.safetensors": b"x",
}  # fmt: skip
WANTED = ["config.json", "model.safetensors"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with loopback_hub() as served:
        served.serve_this_process(monkeypatch, tmp_path / "cache")
        yield served


def test_nothing_else_is_fetched(hub: Hub, heads: Path, target: Target, toy: Toy) -> None:
    """Not even of a head in several files, nor of a causal LM, whose files transformers fetches."""
    hub.add("owner/head", heads / "ours")
    hub.add("owner/head", OTHERS)
    assert EagleHead.from_pretrained("owner/head").config.layout == "fsd" and hub.fetched() == WANTED
    weights = (heads / "eagle3" / "model.safetensors").read_bytes()
    state = EagleHead.from_pretrained(heads / "eagle3", target).state_dict()
    index = json.dumps({"weight_map": dict.fromkeys(state, "part.safetensors")}).encode()
    parts = {"part.safetensors": weights, "other.safetensors": weights, "model.safetensors.index.json": index}
    hub.add("owner/parts", {"config.json": (heads / "eagle3" / "config.json").read_bytes(), **parts})
    assert EagleHead.from_pretrained("owner/parts", target).config.layout == "eagle3"
    assert hub.fetched() == ["config.json", "model.safetensors.index.json", "part.safetensors"]
    hub.add("owner/lm", toy.drafter)
    hub.add("owner/lm", OTHERS)
    assert isinstance(load_drafter("owner/lm", Target.from_pretrained(str(toy.target))), LMDrafter)
    fetched = hub.fetched()
    assert fetched[0] == "config.json" and not set(fetched) & set(OTHERS)
    with pytest.raises(CheckpointError, match="owner/lm holds no draft head"):
        EagleHead.from_pretrained("owner/lm", target)


def test_a_revision_and_a_folder_may_be_named(hub: Hub, heads: Path, target: Target) -> None:
    hub.add("owner/head", heads / "ours")
    hub.add("owner/head", heads / "eagle3", revision="v2")
    files = {f"heads/small/{name}": (heads / "speculators" / name).read_bytes() for name in WANTED}
    hub.add("owner/head", files)
    assert EagleHead.from_pretrained("owner/head").config.layout == "fsd"
    assert EagleHead.from_pretrained("owner/head", target, revision="v2").config.layout == "eagle3"
    found = EagleHead.from_pretrained("owner/head", target, subfolder="heads/small")
    assert found.config.target == {"hidden_size": 32, "vocab_size": VOCAB}
    assert EagleHead.from_pretrained(heads, target, subfolder="ours").config.layout == "fsd"
    drafter = EagleDrafter.from_pretrained("owner/head", target, revision="v2")
    assert drafter.head.config.layout == "eagle3"


def refused(source: str, match: str, target: Target, **options: Any) -> None:
    for load in (EagleHead.from_pretrained, *([] if options else [load_drafter])):
        with pytest.raises(FsdError, match=match) as raised:
            load(source, target, **options)
        one_line(str(raised.value))
        assert source in str(raised.value)


def test_what_the_hub_does_not_have_is_named(hub: Hub, heads: Path, target: Target, monkeypatch: Any) -> None:
    hub.add("owner/head", heads / "ours")
    refused("owner/absent", "owner/absent is neither a directory nor a repository of the Hub", target)
    refused("owner/head", "has no revision 'v9'", target, revision="v9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("owner/head", "not in the cache, and the Hub was not reached", target)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    refused("owner/head", "not in the cache", target, local_files_only=True)
    head = EagleHead.from_pretrained("owner/head", target)
    for offline in (True, False):  # what was fetched once needs no Hub
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        again = EagleHead.from_pretrained("owner/head", target, local_files_only=not offline)
        assert torch.equal(again.fc.weight, head.fc.weight)
    hub.add("owner/part", {"config.json": (heads / "ours" / "config.json").read_bytes()})
    refused("owner/part", "without model.safetensors", target)
    hub.add("owner/lora", {"adapter_config.json": b"{}"})
    with pytest.raises(FsdError, match="owner/lora is an adapter.* fetch it"):
        load_drafter("owner/lora", target)


UPLOADS = [
    ("POST", "/preupload/main", "403", "is refused by the Hub (status 403)"),
    ("POST", "/objects/batch", "500", "which fails (status 500)"),
    ("PUT", "", "cut", "was not transferred whole, the connection broke"),
    ("POST", "/commit/main", "cut", "was not transferred whole, the connection broke"),
    ("POST", "/commit/main", "429", "gets too many requests (status 429)"),
]


@pytest.mark.parametrize(("method", "end", "how", "words"), UPLOADS)
def test_an_upload_that_breaks_off_is_told_and_done_again(
    method: str, end: str, how: str, words: str, hub: Hub, heads: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the weights apart, and of the commit, without which nothing is seen of an upload."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    head = EagleHead.from_pretrained(heads / "ours", target)
    repository = hub.add("owner/new", {})
    repository.stores, repository.refuses = True, (method, end, how)
    with pytest.raises(FsdError) as raised:
        head.push_to_hub("owner/new", token="hf_x")
    one_line(str(raised.value))
    assert words in str(raised.value) and "owner/new" in str(raised.value)
    assert not any(repository.commits.values()), "nothing is seen of it"
    repository.refuses = ("", "", "")
    head.push_to_hub("owner/new", commit_message="a head", token="hf_x")
    found = EagleHead.from_pretrained("owner/new", target)
    assert options_of(found) == options_of(head) and torch.equal(found.fc.weight, head.fc.weight)


def publish(*options: str) -> tuple[int, str, str]:
    return called(cli, ["publish", *options])


@pytest.fixture(scope="module")
def trained(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that drafts well, with the record of a training."""
    directory = tmp_path_factory.mktemp("trained") / "head"
    target = Target.from_pretrained(str(toy.target), dtype=torch.float32)
    torch.manual_seed(1)  # of a head that drafts hardly a token
    head = EagleHead(EagleConfig.for_target(target, layout="eagle3", draft_vocab_size=50))
    head.config.training = {
        "steps": 20,
        "hyperparameters": {"target": str(toy.target), "loss": "eagle"},
        "metrics": {"val_agreement_0": 0.75, "val_agreement_1": 0.5},
        "data": ["answers.jsonl"],
    }
    head.save_pretrained(directory)
    return directory


def test_a_published_head_has_a_card_with_its_measurements(
    hub: Hub, trained: Path, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setattr("fsd_train.commands.publish.MIN_TAU", 0.0)
    known = ["--base-model", "owner/target", "--base-revision", "abc", "--license", "mit", "--dataset", "owner/data"]
    (tmp_path / "curves.png").write_bytes(b"picture")
    options = [str(trained), "owner/head", *known, "--max-new-tokens", "12", "--limit", "3"]
    options += ["--curve", str(tmp_path / "curves.png")]
    status, shown, said = publish(*options)
    assert status == 2 and "give --yes" in said and ("models", "owner/head") not in hub.repositories
    with monkeypatch.context() as terminal:
        terminal.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
        terminal.setattr("builtins.input", lambda question: "n" if "owner/head" in question else "y")
        assert publish(*options)[0] == 1 and not any(line.startswith("POST") for line in hub.asked)
    status, shown, said = publish(*options, "--yes")
    assert status == 0, said
    repository = hub.repositories["models", "owner/head"]
    files = repository.commits[repository.refs["main"]]
    assert set(files) == {*WANTED, "README.md", "results.json", "curve.png"}
    assert files["README.md"].decode() in shown + "\n"
    uploaded = json.loads(files["config.json"])
    kept = json.loads((trained / "config.json").read_text())
    assert str(toy.target) in json.dumps(kept) and str(toy.target) not in json.dumps(uploaded), "no local path"
    assert uploaded["layout"] == kept["layout"] and uploaded["training"]["data"] == kept["training"]["data"]
    card = ModelCard(files["README.md"].decode())
    data = card.data.to_dict()
    assert data["base_model"] == "owner/target" and data["library_name"] == "fsd-toolkit" and data["license"] == "mit"
    assert data["pipeline_tag"] == "text-generation" and "eagle3" in data["tags"] and data["datasets"] == ["owner/data"]
    for fact in ("owner/target at abc", "EAGLE-3", "50 of", "20 steps", "75.0%, 50.0%", "depth 5, width 6, 16 nodes",
                 "3 of quickstart_prompts", "--drafter owner/head", "--to vllm", "vllm serve owner/target",
                 "not possible: it fuses 2 layers, there are always three. Use --to vllm"):  # fmt: skip
        assert fact in card.text, fact
    results = json.loads(files["results.json"])
    assert [(group["name"], group["prompts"]) for group in results["chains"]["groups"]] == [("chat", 2), ("code", 1)]
    for group in results["chains"]["groups"]:
        assert len(group["accepted"]) == len(group["tau"]) == 7 and sorted(group["accepted"])[::-1] == group["accepted"]
        assert group["tau"][-1] == pytest.approx(1 + sum(group["accepted"]))
        assert f"| {group['name']} | {group['prompts']} |" in card.text
    assert results["target"] == "owner/target" and "/" not in results["environment"]["cpu"]
    assert "bytes" not in card.text and EagleHead.from_pretrained("owner/head").config.layout == "eagle3"


def test_what_cannot_be_published_is_refused_in_a_line(hub: Hub, trained: Path, toy: Toy, monkeypatch: Any) -> None:
    """A head that does not fit or drafts nothing, a directory without one, a hub that does not let in."""
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    few = ["--max-new-tokens", "4", "--limit", "2", "--yes"]
    refusals = {
        (str(trained), "owner/head", *few): "has an acceptance length of",
        (str(trained), "head", *few): "needs the form owner/name",
        (str(toy.target), "owner/head", *few): "is not a head",
        (str(trained), "owner/head", "--target", "smollm2-135m", *few): "was trained",
        (str(trained), "owner/head", "--prompts", "absent.jsonl", *few): "absent.jsonl is missing",
    }
    for options, message in refusals.items():
        status, _, said = publish(*options)
        assert status == 2 and message in said, said
        one_line(said.strip().splitlines()[-1])
    assert not any(line.startswith("POST") for line in hub.asked)
    for holder, name, value, message in (
        (constants, "HF_HUB_OFFLINE", True, "while HF_HUB_OFFLINE is set"),
        (publishing, "get_token", lambda: None, "Log in with `hf auth login`, or set HF_TOKEN"),
        (hub, "token", 401, "refuses the token (status 401). Log in again"),
        (hub, "token", "read", "the token may only read"),
        (constants, "ENDPOINT", "http://127.0.0.1:1", "127.0.0.1 does not answer: ConnectError"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, value)
            patch.setattr(publishing, "measured", None)  # which is not begun
            status, _, said = publish(str(trained), "owner/head", *few)
        assert status == 2 and message in said.splitlines()[-1], said
    hub.token = 429
    monkeypatch.setattr("fsd_train.commands.publish.MIN_TAU", 0.0)
    repository = hub.add("owner/new", {})
    for repository.fault, message in (
        ("403 Forbidden", "(status 403): log in"),
        ("429 Busy", "to wait 100000 seconds"),
    ):
        repository.headers = {"Retry_After": "100000"}
        status, shown, said = publish(str(trained), "owner/new", *few)
        assert f"Draft head for {toy.target.name}" in shown and str(toy.target.parent) not in shown, "no local path"
        assert "whether the token may write is not known" in said and "give its --base-model" in said
        assert status == 2 and message in said.splitlines()[-1] and "owner/new" in said.splitlines()[-1], said


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


CHAT = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]} for n in range(5)
]
SAID = {"from": "human", "value": "hi"}
FILES = {
    "me/chat": {
        "README.md": b"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train_sft\n"
        b"    path: sft.jsonl\n  - split: test\n    path: test.jsonl\n---\n",
        "sft.jsonl": lines(CHAT),
        "test.jsonl": lines(CHAT[:1]),
    },
    "me/shares": {"train.jsonl": lines([{"conversations": [SAID, {"from": "gpt", "value": "yes"}], "id": "x"}])},
    "me/ultra": {"train.jsonl": lines([{"id": "0", "data": ["ask", "answer", "again", "more"]}])},
}
OLD = {"train.jsonl": lines([{"instruction": "say", "said": "old"}])}  # of revision v1


@pytest.fixture
def data_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub with these data sets, which the library `datasets` asks too."""
    for name, files in FILES.items():
        hub.add(name, files, kind="datasets")
    hub.add("me/shares", OLD, revision="v1", kind="datasets")
    hub.serve_datasets(monkeypatch, tmp_path / "datasets")
    return hub


def test_rows_come_from_the_hub(data_hub: Hub) -> None:
    names = [
        "hf:me/chat?split=train_sft", "hf:me/chat@main?split=train_sft&limit=2", "hf:me/shares",
        "hf:me/shares@v1?response=said", "hf:me/ultra",
    ]  # fmt: skip
    found = [list(read_rows(name)) for name in names]
    chat, first, shares, old, ultra = ([row.values for row in rows] for rows in found)
    assert [row["messages"] for row in chat] == [row["messages"] for row in CHAT] and first == chat[:2]
    assert found[0][0].where == "hf:me/chat?split=train_sft:1"
    assert row_messages(shares[0]) == [{"role": "user", "content": "hi"}]
    assert [turn["content"] for turn in row_conversation(old[0])] == ["say", "old"]
    assert [turn["role"] for turn in row_conversation(ultra[0])] == ["user", "assistant"] * 2
    digests = {rows_digest(name) for name in names}
    assert len(digests) == 5 and {len(digest) for digest in digests} == {64}


DATA_FAULTS = [
    ("hf:me/nothing", "hf:me/nothing"), ("hf:me/shares@v9", "hf:me/shares@v9"),
    ("hf:me/chat?split=valid", "valid"), ("hf:me/shares?prompt=text", "no column 'text'"),
    ("hf:me/chat?split=train_sft", "hf:me/chat: unreadable"),
    ("hf:me", "is named hf:OWNER/NAME"), ("hf:a/b/c", "is named hf:OWNER/NAME"),
    ("hf:me/x?limit=0", "limit must be a whole number"), ("hf:me/x?colour=red", "cannot use 'colour=red'"),
    ("hf:me/x?split=", "cannot use 'split='"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words"), DATA_FAULTS)
def test_faults_of_a_data_set(name: str, words: str, data_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    if "unreadable" in words:
        data_hub.repositories["datasets", "me/chat"].fault = "500 Broken"
        monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(DataError) as raised:
        list(read_rows(name))
    assert words in str(raised.value) and "\n" not in str(raised.value)
