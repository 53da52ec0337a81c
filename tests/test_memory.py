"""The memory of key-value caches is known before any is allocated, and bounded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fsd_infer
from fsd_core.errors import CacheMemoryError
from fsd_infer import FuzzyDecoder, Target
from fsd_infer.device.cache import SlotCache
from fsd_infer.device.memory import free_bytes
from fsd_infer.drafters import GraftedDrafter, LMDrafter, LookupDrafter, NoDrafter, TreeShape
from tests.families import FAMILIES, VOCAB, tiny_head, tiny_model, tiny_prompts


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[SlotCache]:
    """All that are made, but for those of one token and the views of rows."""
    made: list[SlotCache] = []
    begin = SlotCache.__init__

    def kept(self: SlotCache, config: Any, batch: int, slots: int) -> None:
        begin(self, config, batch, slots)
        if slots > 1:
            made.append(self)

    monkeypatch.setattr(SlotCache, "__init__", kept)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_stated_as_they_are_taken(family: str, caches: list[SlotCache]) -> None:
    target = Target(tiny_model(family))
    stats = FuzzyDecoder(target, NoDrafter(VOCAB)).generate([[1, 2], [3, 4]], max_new_tokens=3, do_sample=False).stats
    assert stats.cache_bytes == sum(cache.nbytes for cache in caches) > 0
    assert stats.to_dict()["cache_bytes"] == stats.cache_bytes


def test_a_drafters_caches_count(caches: list[SlotCache]) -> None:
    target = Target(tiny_model("llama").bfloat16())
    eagle = tiny_head(target, num_layers=2)
    small = LMDrafter(Target(tiny_model("llama", num_hidden_layers=1)), target, TreeShape.chain(3))
    for drafter in (eagle, small, GraftedDrafter(eagle, LookupDrafter(VOCAB))):
        caches.clear()
        stats = FuzzyDecoder(target, drafter).generate(tiny_prompts()[:1], max_new_tokens=9, do_sample=False).stats
        assert [cache.nbytes > 0 for cache in caches] == [True, True]
        assert stats.cache_bytes == sum(cache.nbytes for cache in caches)


def test_too_large_a_request_is_refused(caches: list[SlotCache], monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"))
    decoder = FuzzyDecoder(target, tiny_head(target))
    options: dict[str, Any] = dict(max_new_tokens=9, do_sample=False)
    found = decoder.generate(tiny_prompts(), **options)
    needed = found.stats.cache_bytes
    assert decoder.generate(tiny_prompts(), max_cache_bytes=needed, **options).sequences == found.sequences
    caches.clear()
    with pytest.raises(CacheMemoryError, match=rf"4 rows .* {needed} bytes .* max_cache_bytes .* {needed - 1} bytes"):
        decoder.generate(tiny_prompts(), max_cache_bytes=needed - 1, **options)
    hook = dict(custom_generate=fsd_infer.generate, drafter=decoder.drafter, max_cache_bytes=10)
    with pytest.raises(CacheMemoryError, match="smaller batch.* smaller max_new_tokens"):
        target.model.generate(torch.tensor([[1, 2]]), **hook, **options)
    monkeypatch.setattr("fsd_infer.device.memory.free_bytes", lambda device: needed - 1)
    with pytest.raises(CacheMemoryError, match=rf"{needed} bytes .* {needed - 1} bytes .* free on cpu"):
        decoder.generate(tiny_prompts(), **options)
    assert not caches
    monkeypatch.setattr("fsd_infer.device.memory.free_bytes", lambda device: None)
    assert decoder.generate(tiny_prompts(), **options).sequences == found.sequences


def test_free_memory_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = SimpleNamespace(read_text=lambda: "MemTotal:  900 kB\nMemAvailable:     700 kB\n")
    monkeypatch.setattr("fsd_infer.device.memory.Path", lambda path: meminfo)
    assert free_bytes(torch.device("cpu")) == 700 * 1024
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert free_bytes(torch.device("cuda", 1)) == 120
    assert free_bytes(torch.device("meta")) is None
    monkeypatch.setattr("fsd_infer.device.memory.Path", lambda path: Path("/nowhere/meminfo"))
    assert free_bytes(torch.device("cpu")) is None
