"""The forward that measurements repeat is the target's own."""

from __future__ import annotations

import pytest
import torch

from fsd_bench.probe import Probe
from fsd_infer import Target
from tests.families import VOCAB, tiny_model


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_probe_repeats_the_targets_forward(family: str) -> None:
    model = tiny_model(family)
    probe = Probe(Target(model), 20, 6)
    text = torch.arange(26)[None] % VOCAB
    with torch.no_grad():
        expected = model(text).logits[:, 20:]
        features = model.get_decoder()(text[:, :20])[0]
    torch.testing.assert_close(probe.features, features, atol=1e-4, rtol=1e-4)
    for nodes in (6, 1, 4, 6):
        assert torch.equal(probe.tokens(nodes), text[:, 20 : 20 + nodes])
        found = probe(nodes)
        torch.testing.assert_close(found, expected[:, :nodes], atol=1e-4, rtol=1e-4)
        assert torch.equal(probe(nodes, probe.visible(nodes)), found)
