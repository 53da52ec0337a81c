"""Kernels over rows of logits: maxima, sums, the likeliest, the largest, divergences; and a head's step as one call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TopKLogitsWarper

from fsd_core import functional, sampling
from fsd_core.divergence import divergence, divergence_rows
from fsd_core.errors import NonFiniteLogitsError
from fsd_core.functional import at_nodes
from fsd_infer import Target
from fsd_infer.backends.cpu import functions
from fsd_infer.backends.cpu.kernels import PLAIN_DIVERGENCES
from fsd_infer.drafters import EagleDrafter
from fsd_infer.drafters.vocabulary import NEVER
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.request.processors import TreeProcessors
from fsd_infer.rules import Exact, RoundInput, RuleInputs
from fsd_infer.rules.walk import exact_walk
from fsd_infer.targets.logit_form import LogitForm
from tests.kernel_toys import CPU, in_each_set, needs_kernels
from tests.test_kernels import calls_of_kernels, fitting_model
from tests.tree_rounds import drawn_tree

pytestmark = pytest.mark.usefixtures("several_threads")


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_kernels), False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [5, 32, 97, 4096])
def test_statistics_of_rows(columns: int, dtype: torch.dtype, compiled: bool, fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("FSD_KERNELS", str(int(compiled)))
    x = torch.randn(2, 7, columns).mul(2).round().to(dtype)  # many equals
    x[0, 1] = -torch.inf
    x[0, 2, 1:] = -torch.inf
    x[1, 3, -1] = torch.nan
    x[1, 4, 0] = torch.inf
    x[1, 5] = -x[1, 5].abs() - 1
    x[1, 5, 1], x[1, 5, 3] = -0.0, 0.0  # equal
    x[1, 6, -2] = -torch.tensor(torch.nan)
    highest, best, total = functional.row_stats(x)
    torch.testing.assert_close(highest, x.float().amax(-1), equal_nan=True)
    torch.testing.assert_close(total.double(), x.double().logsumexp(-1), equal_nan=True, rtol=1e-6, atol=1e-5)
    broken = ((1, 3), (1, 6))
    for b, n in torch.cartesian_prod(torch.arange(2), torch.arange(7)).tolist():
        assert (b, n) in broken or best[b, n] == (x[b, n] == x[b, n].max()).nonzero()[0, 0]
    again, where = functional.row_max(x)
    torch.testing.assert_close(again, highest, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(where, best)
    where = torch.zeros(2, 7, dtype=torch.bool)
    where.view(-1)[[13, 0, 2, 12]] = True
    for found, whole in zip(functional.row_stats(x, where), (highest, best, total), strict=True):
        torch.testing.assert_close(found[where], whole[where], equal_nan=True)
    count = min(columns, 10)
    log_q, likeliest = functional.topk_logprobs(x, count)
    for b, n in torch.cartesian_prod(torch.arange(2), torch.arange(7)).tolist():
        assert len(set(likeliest[b, n].tolist())) == count and int(likeliest[b, n].max()) < columns
        if highest[b, n].isfinite():
            order = x[b, n].float().log_softmax(-1).sort(descending=True, stable=True)
            torch.testing.assert_close(log_q[b, n], order.values[:count], atol=1e-5, rtol=1e-5)
            assert not compiled or likeliest[b, n].tolist() == order.indices[:count].tolist(), "of equals the first"
    torch.testing.assert_close(functional.topk_logprobs(x, 2, where)[0][0, 0], log_q[0, 0, :2])
    p, entropy = x.double().softmax(-1), functional.row_entropy(x)
    fit = highest.isfinite()
    torch.testing.assert_close(entropy[fit].double(), torch.special.entr(p)[fit].sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(functional.row_entropy(x, where)[where & fit], entropy[where & fit])


@pytest.mark.parametrize("columns, count", [(5, 5), (97, 6), (8192, 300)])
def test_the_largest_are_kept_as_transformers_does_it(columns: int, count: int) -> None:
    scores = 4 * torch.randn(2, 6, columns)
    scores[0, 1] = scores[0, 1].round()  # many equals
    scores[0, 2, 1:] = -torch.inf
    scores[0, 3] = torch.arange(columns) / 256
    before = scores.clone()
    processors = LogitsProcessorList([TopKLogitsWarper(count, filter_value=-7.0)])
    found = TreeProcessors(processors).process_context_free(scores)
    assert torch.equal(found, torch.stack([processors[0](None, row) for row in scores]))  # type: ignore[arg-type]
    assert torch.equal(scores, before)
    scores[1, 0, columns // 2] = torch.nan
    assert functional.keep_top_k(scores, count)[1, 0].isnan().any()


@needs_kernels
@pytest.mark.parametrize("name", PLAIN_DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns, drafted", [(4097, 1000), (100, 37), (100, None), (16, None)])
def test_divergences(name: str, dtype: torch.dtype, columns: int, drafted: int | None) -> None:
    measure = divergence(name)
    ids = None if drafted is None else torch.randperm(columns)[:drafted]
    p = (3 * torch.randn(2, 4, columns)).to(dtype)
    q = (p if ids is None else p[..., ids]).float() + torch.randn(2, 4, drafted or columns)
    p[0, 1, ::3], q[0, 2, 1::2], p[0, 3, 0] = -torch.inf, torch.finfo(torch.float32).min, torch.nan
    q[1, 0] = p[1, 0].float() if ids is None else p[1, 0, ids].float()
    p[1, 1, 0], q[1, 2], q[1, 3, 0] = torch.inf, -torch.inf, torch.nan
    if ids is None or not measure.infinite_on_reduced_vocabulary:
        assert functions.divergence_rows(p, q, measure, ids) is not NotImplemented
    found = divergence_rows(p, q, measure, ids)
    expected = measure.with_reduced_drafter(p.double(), q.double(), ids)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5, equal_nan=True)
    if ids is None:
        assert found[1, 0] == 0, "equal distributions"
    assert found.isnan().flatten().tolist() == [False] * 3 + [True, False] + [True] * 3


@pytest.mark.parametrize("name", ["js", "tv", "top_k_js:4"])
@pytest.mark.parametrize("p_type", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("q_type", [torch.bfloat16, torch.float32])
def test_some_rows_are_compared_where_they_lie(name: str, p_type: torch.dtype, q_type: torch.dtype) -> None:
    measure, ids = divergence(name), torch.randperm(97)[:40]
    p, q = torch.randn(2, 4, 97).to(p_type), torch.randn(2, 3, 40).to(q_type)
    index = torch.tensor([[2, -1, 0, 2], [1, 0, -1, -1]])
    found = divergence_rows(p, q, measure, ids, index)
    for row, node in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
        if index[row, node] < 0:
            assert found[row, node] == torch.inf
        else:
            pair = p[row, node].double(), q[row, index[row, node]].double()
            expected = measure.with_reduced_drafter(*pair, ids)
            torch.testing.assert_close(found[row, node].double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(divergence_rows(p, q, measure, ids.int(), index), found)
    for wrong in ((ids, index + 3), (ids - 1 - ids.min(), index), (ids + 97, index)):
        with pytest.raises(IndexError):
            divergence_rows(p, q, measure, *wrong)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_kernels), False])
@pytest.mark.parametrize("p_type", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("drafted", [40, 97, None])
def test_what_weighted_rows_leave(
    drafted: int | None, p_type: torch.dtype, compiled: bool, fresh: pytest.MonkeyPatch
) -> None:
    fresh.setenv("FSD_KERNELS", str(int(compiled)))
    ids = None if drafted is None else torch.randperm(97)[:drafted].int()
    p, q = torch.randn(2, 4, 97).mul(2).to(p_type), torch.randn(2, 3, drafted or 97)
    p[0, 0, ::3], q[0, 2, 1:5] = -torch.inf, -torch.inf
    index, weight = torch.tensor([[2, -1, 0, 2], [1, 0, -1, -1]]), torch.rand(2, 4).double()
    weight[0, 0], weight[1, 0] = 1.0, 0.0
    found = sampling.residual_mass(p, q, weight, index, ids)
    whole = torch.zeros(2, 3, 97).double()
    whole[..., torch.arange(97) if ids is None else ids.long()] = q.double().softmax(-1)
    left = (weight[..., None] * p.double().softmax(-1) - at_nodes(whole, index.clamp_min(0))).clamp_min(0.0).sum(-1)
    assert found.dtype == torch.double
    torch.testing.assert_close(found, left.masked_fill(index < 0, 0.0), atol=1e-6, rtol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [5, 512, 1300])
def test_a_row_is_sampled_by_inverse_cdf(columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, columns).mul(3).to(dtype)
    x[0, :, ::3] = -torch.inf
    x[1, 0, 1:] = -torch.inf
    where = torch.tensor([[True, False], [True, True], [False, True]])
    cdf = torch.cat([torch.zeros(3, 2, 1).double(), x.double().softmax(-1).cumsum(-1)], -1)
    for uniform in (0.0, 0.123, 0.5, 0.98765, 1.0 - 2**-24):
        found = sampling.sample_rows(x, torch.full((3, 2), uniform), where)
        inside = cdf.gather(-1, torch.stack([found, found + 1], -1)) + torch.tensor([-1e-6, 1e-6])
        assert bool(((inside[..., 0] <= uniform) & (uniform <= inside[..., 1]))[where].all())
        assert bool((x.gather(-1, found[..., None]) > -torch.inf)[..., 0][where].all())


@needs_kernels
@pytest.mark.parametrize("types", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("drafted", [40, 1300, None, 0])
def test_what_is_left_is_drawn_by_inverse_cdf(drafted: int | None, types: tuple[torch.dtype, torch.dtype]) -> None:
    """Rows without a q, with all of p refused, and of another tree's nodes among them; 0: a round without any q."""
    p, q = torch.randn(4, 3, 1300).to(types[0]), torch.randn(4, 2, drafted or 1300).to(types[1])
    p[0, 1, ::3], p[3, 0, 2:] = -torch.inf, -torch.inf
    ids = torch.randperm(1300)[:drafted].int() if drafted in (40, 1300) else None
    refused = torch.tensor([[-1, 7], [3, 3], [-1, -1], [0, 1]])
    rest = sampling.Rest(p, torch.tensor([1, 2, 0, 0]), torch.tensor([1.0, 0.4, 0.9, 1.0]).double(), refused)
    rest = rest if drafted == 0 else rest._replace(q_logits=q, q_index=torch.tensor([1, 0, -1, 1]), draft_ids=ids)
    weights = rest.weights().double()
    cdf = torch.nn.functional.pad(weights.cumsum(-1), (1, 0)) / weights.sum(-1, keepdim=True).clamp_min(1e-9)
    for uniform in (0.0, 0.123, 0.5, 0.98765, 1.0 - 2**-24):
        found = sampling.draw_rest(rest, torch.full((4,), uniform))
        assert found[3] == 1300 and bool((weights[:3].gather(1, found[:3, None]) > 0).all())
        inside = cdf.gather(1, torch.stack([found, found + 1], 1).clamp_max(1300)) + torch.tensor([-1e-5, 1e-5])
        assert bool(((inside[:3, 0] <= uniform) & (uniform <= inside[:3, 1])).all())


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_which_children_are_fixed_and_which_contexts_draw(width: int, dtype: torch.dtype) -> None:
    drawn = 0
    for _ in range(50):
        scores = torch.stack([torch.randperm(40) for _ in range(8)]).view(2, 4, 40).div(3).to(dtype)  # no equals
        accept, ancestors = torch.randn(2, 4).sub(2).clamp_max(0.0), torch.rand(2, 4, 9) < 0.4
        given = scores, width, accept, ancestors, torch.rand(2, 9) < 0.3, torch.randint(0, 12, (2,)), (1.1, 0.9), -4.0
        found, expected = sampling.mixed_children(*given), sampling.mixed_children.__wrapped__(*given)  # type: ignore[attr-defined]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        drawn += int(found.drawn.sum())
    assert 20 < drawn < 380


@needs_kernels
@pytest.mark.parametrize("types", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("kind", ["tree", "chain", "likely tokens"])
@pytest.mark.parametrize("drafted", [12, None])
def test_a_sampled_round_walks_as_in_torch(
    drafted: int | None, kind: str, types: tuple[torch.dtype, torch.dtype]
) -> None:
    """Trees with padding, contexts without q, processed logits of another type; what is wrong is left to torch."""
    tree, p = drawn_tree(kind, drafted, types[1], 300), torch.randn(300, 8, 23).mul(2)
    for processed in (False, True):
        logits, uniforms = p.to(types[0], copy=True), torch.rand(300, 9, 3)[:, :8]
        round = RoundInput(tree, logits, logits.float().div(0.7) if processed else logits, False, uniforms)
        in_torch = exact_walk.__wrapped__  # type: ignore[attr-defined]
        inputs = (RuleInputs(replace(round, tree=replace(tree))) for _ in range(2))
        found, expected = functions.exact_walk(round.scores, next(inputs)), in_torch(round.scores, next(inputs))
        assert found.keys() | {"allowed", "faults"} == expected.keys()
        for name in found.keys() - {"proposers"}:
            torch.testing.assert_close(found[name], expected[name], check_dtype=False, equal_nan=True, msg=name)
        assert 0.05 < found["accepted"].float().mean() < 3
        for wrong in ({"tokens": tree.tokens.int()}, {"drawn": torch.rand(300, 8)}, {"depth_bound": 1}):
            odd = replace(round, tree=replace(tree, **wrong))
            assert functions.exact_walk(odd.scores, RuleInputs(odd)) is NotImplemented, wrong
        few = replace(round, uniforms=uniforms[:, :2])
        assert functions.exact_walk(few.scores, RuleInputs(few)) is NotImplemented
        round.logits[5, 3, 7] = torch.nan
        assert functions.exact_walk(round.scores, RuleInputs(round)) is NotImplemented
        with pytest.raises(NonFiniteLogitsError, match="the target's logits in row 5"):
            Exact()(round)


# a head's step --------------------------------------------------------------------------------------------------------


@in_each_set
@pytest.mark.parametrize(("fused", "tied"), [([], False), ([0, 2], True)])
def test_a_heads_step_is_one_call_and_gives_what_its_modules_give(
    fused: list[int], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(fitting_model("llama", num_hidden_layers=3, vocab_size=128, tie_word_embeddings=tied))
    head = EagleHead(EagleConfig.for_target(target, fused_layers=fused, feature_scale=True, draft_vocab_size=64))
    for parameter in head.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3 if parameter.dim() == 1 else 0.1)
    head.feature_scale.uniform_(0.5, 2.0)
    drafter = EagleDrafter(head, target)
    for module in (target.model, *drafter.modules()):
        CPU.prepare(module, release=True)
    for owner in (target, head):
        owner.stack = CPU.stack_for(owner)
    calls = calls_of_kernels(monkeypatch)
    vocabulary = drafter.context_vocabulary(2)
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
