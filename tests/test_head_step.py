"""A draft head's step as one call of the CPU kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsd_infer import Target
from fsd_infer.drafters import EagleDrafter
from fsd_infer.drafters.vocabulary import NEVER
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.targets.logit_form import LogitForm
from tests.kernel_toys import CPU, in_each_set
from tests.test_kernels import calls_of_kernels, fitting_model

pytestmark = pytest.mark.usefixtures("several_threads")


@in_each_set
@pytest.mark.parametrize(("fused", "tied"), [([], False), ([0, 2], True)])
def test_a_heads_step_is_one_call_and_gives_what_its_modules_give(
    fused: list[int], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(fitting_model("llama", num_hidden_layers=3, vocab_size=128, tie_word_embeddings=tied))
    head = EagleHead(EagleConfig.for_target(target, fused_layers=fused, feature_scale=True, draft_vocab_size=64))
    for parameter in head.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3 if parameter.dim() == 1 else 0.1)
    assert head.feature_scale is not None
    head.feature_scale.uniform_(0.5, 2.0)
    drafter = EagleDrafter(head, target)
    for module in (target.model, *drafter.modules()):
        CPU.prepare(module, release=True)
    for owner in (target, head):
        owner.stack = CPU.stack_for(owner)
    calls = calls_of_kernels(monkeypatch)
    vocabulary = drafter.context_vocabulary(2)
    assert vocabulary is not None
    vocabulary.extend([[70, 90, 127], [90]])  # which 64 entries lack
    torch.manual_seed(0)
    tokens = torch.randint(128, (2, 5))

    def found(width: int) -> list[Tensor]:
        cache, lengths = drafter.model.new_cache(2, 20), torch.tensor([3, 6])
        torch.manual_seed(1)
        features, visible_after = torch.randn(2, 5, width).bfloat16(), torch.ones(2, 5, 5, dtype=torch.bool).tril()
        slots, visible = cache.after_text(lengths, visible_after)
        made = drafter.step(cache, visible, tokens, features, slots, vocabulary)
        return [*made, *cache.keys_and_values(head.stack.key_heads, head.stack.width, torch.bfloat16)]

    for width in {128, 128 * (1 + len(fused))}:
        with torch.inference_mode():
            calls.clear()
            faster = found(width)
            assert not calls, "no layers by themselves"
            monkeypatch.setattr(drafter, "_fused_step", None)
            for one, other in zip(faster, found(width), strict=True):
                assert torch.equal(one == NEVER, other == NEVER)
                assert float((one - other).float().norm()) <= 0.01 * float(other.float().norm())
            assert calls == [10]
        monkeypatch.setattr(drafter, "_step_stack", None)
    tokens[1, 2] = 128
    with pytest.raises(IndexError), torch.inference_mode():
        found(128)
    tokens[1, 2] = 0
    handle = head.fc.register_forward_hook(lambda module, args, out: out + 1)  # called, since it may change things
    with torch.inference_mode():
        found(128)
    assert calls == [10, 10]
    handle.remove()
    target.logit_form = LogitForm(cap=30.0)
    assert drafter._find_fused_step() is None
