"""Our CPU kernels compute what torch computes, row by row, and decoding does without them where it must."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.backends.cpu import stack as stack_module
from fsd_infer.backends.cpu.kernels import MAX_ROWS, Kernels
from fsd_infer.backends.cpu.packing import Packed, packed_of, packed_products
from fsd_infer.backends.cpu.sets import SETS
from fsd_infer.backends.cpu.stack import CpuStack
from fsd_infer.device.cache import SlotCache, cache_argument
from fsd_infer.drafters import EagleDrafter, NoDrafter
from fsd_infer.drafters.eagle import EagleSession
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.targets.stack import StackInputs
from fsd_train.models.start import initialise_from
from tests.families import VOCAB, save_head, tell, tiny_model, tiny_prompts
from tests.kernel_toys import in_each_set, logits_through_cache, prepare, restore

pytestmark = pytest.mark.usefixtures("several_threads")
FITTING: dict[str, Any] = dict(hidden_size=128, intermediate_size=192, head_dim=32)  # panels are 32 or 64 columns wide
KNOWN = ["llama", "mistral", "qwen2", "qwen3"]


def fitting_model(family: str, **options: Any) -> Any:
    model = tiny_model(family, scale=2.0, **{**FITTING, **options}).to(torch.bfloat16)
    for name, value in model.state_dict().items():
        if "norm" in name or "bias" in name:  # ones and zeros by default, which would hide a mistake
            value.copy_(torch.rand_like(value) + 0.5)
    return model


def assert_products(made: Packed, layer: torch.nn.Linear, x: Tensor, atol: float) -> None:
    """As torch's in fp64, rounded once, row by row."""
    expected = F.linear(x.double(), made.dense().double(), None if layer.bias is None else layer.bias.double())
    torch.testing.assert_close(made(x).double(), expected, atol=atol, rtol=2**-8)
    assert torch.equal(made(x)[-1], made(x[-1:])[0]), "a row does not depend on the others"


@in_each_set
@pytest.mark.parametrize(("rows", "bias"), [
    *((rows, rows % 2 == 0) for rows in range(1, 8)), (16, False), (33, True), (MAX_ROWS + 1, False),
])  # fmt: skip
def test_products_of_bf16_and_of_fp8_weights(rows: int, bias: bool) -> None:
    depth = 160  # which AVX2 reads in two parts
    layer = torch.nn.Linear(depth, 192, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight[3], layer.weight[4, 7] = 0.0, 2.0  # nothing, and one that dwarfs the others
    made, x = Packed(layer), torch.randn(rows, depth).bfloat16()
    before = made.dense()
    assert made.native and torch.equal(before, layer.weight), "oneDNN's layout is the one they read"
    assert torch.equal(made(x.T.contiguous().T), made(x)) and torch.equal(made(x[None])[0], made(x)), "any strides"
    if rows <= MAX_ROWS:  # beyond them oneDNN rounds otherwise
        assert_products(made, layer, x, 1e-4)
    made.quantize()
    off, most = (made.dense().double() - before.double()).abs(), before.double().abs().amax(1, keepdim=True)
    bound = torch.maximum(before.double().abs() / 33, most / 248) + made.dense().double().abs() / 2**8  # of bf16
    assert bool((off <= bound + 1e-30).all()) and float(off.max()) > 0
    assert made.weight.nbytes == depth * 192
    assert_products(made, layer, x, 2e-2)


SHORT, LONG, WIDE = ((4, 4), 20), ((4, 2), 75), ((16, 2), 75)  # heads of queries and of keys, length of the text
ROTARY: dict[str, dict[str, Any]] = {
    "default": {}, "linear": dict(factor=4.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    "dynamic": dict(factor=2.0),
}  # fmt: skip


def rotary(kind: str) -> dict[str, Any]:
    return {"rope_parameters": dict(rope_type=kind, rope_theta=1e4, **ROTARY[kind])}


@in_each_set
@pytest.mark.parametrize(("family", "sizes", "rope"), [
    *product(KNOWN, (SHORT, LONG, WIDE), ["default"]), *product(["llama"], [LONG], ["linear", "llama3"]),
])  # fmt: skip
def test_layers_are_closer_to_fp32_than_torchs_own(family: str, sizes: tuple[tuple[int, int], int], rope: str) -> None:
    heads, length = sizes
    model = fitting_model(family, num_attention_heads=heads[0], num_key_value_heads=heads[1], **rotary(rope))
    target = Target(model)
    plain = logits_through_cache(target, length=length)
    assert isinstance(prepare(target, release=True), CpuStack)
    for parameter in model.parameters():  # as where memory is handed back: no address may point there
        if not parameter.is_meta:
            old, parameter.data = parameter.data, parameter.data.clone()
            old.fill_(torch.nan)
    fast = logits_through_cache(target, length=length)
    restore(target)
    exact = logits_through_cache(Target(model.float()), length=length)
    assert float((fast - exact).norm()) < 1.1 * float((plain - exact).norm()) < 0.05 * float(exact.norm())


@in_each_set
@pytest.mark.parametrize("heads", [(2, 1), (4, 4)])
def test_any_number_of_threads_computes_the_same_bits(heads: tuple[int, int]) -> None:
    """Threads share the slots and columns of heads, also where there are more of them than heads."""
    target = Target(fitting_model("llama", num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=64))
    assert isinstance(prepare(target), CpuStack)
    found = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        found.append(logits_through_cache(target, length=70))
    assert all(torch.equal(each, found[0]) for each in found)


@in_each_set
def test_a_tied_embedding_is_read_from_the_packed_head() -> None:
    model = fitting_model("llama", vocab_size=192, tie_word_embeddings=True)
    target, head, table = Target(model), model.get_output_embeddings(), model.get_input_embeddings()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weight, digest = before["lm_head.weight"], target.weights_digest()
    prepare(target)
    expected = logits_through_cache(target)
    restore(target)
    prepare(target, release=True)
    assert head.weight.is_meta and table.weight.shape == (0, model.config.hidden_size), "held once"
    assert target.device == torch.device("cpu") and target.vocab_size == 192
    ids = torch.tensor([[0, 191, 31], [32, 33, 64]])
    assert torch.equal(target.embed(ids), weight[ids])
    assert torch.equal(target.lm_head_rows(ids[0])[0], weight[ids[0]])
    assert target.weights_digest() == digest
    assert torch.equal(logits_through_cache(target), expected)
    for wrong in (-1, 192):
        with pytest.raises(IndexError, match="the vocabulary has 192"):
            target.embed(torch.tensor([3, wrong]))
    restore(target)
    assert packed_of(table) is None and head.weight is table.weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    prepare(target)
    assert table.weight.shape == (192, model.config.hidden_size), "only where the model is ours"


def forward(target: Target, length: int) -> tuple[Tensor, Tensor]:
    """Logits and features of a prompt."""
    ids, where = torch.tensor(tiny_prompts((length,))), torch.arange(length)[None]
    cache = target.new_cache(1, length)
    cache.set_write_slots(where, 0, length)
    return target.forward(ids, where, where[:, None] <= where[..., None], cache)


def calls_of_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of the kernels' decoder layers has from now on."""
    made, own = list[int](), Kernels.stack

    def counted(self: Kernels, stack: Any, forward: Any) -> None:
        made.append(forward.batch * forward.count)
        own(self, stack, forward)

    monkeypatch.setattr(Kernels, "stack", counted)
    return made


@in_each_set
def test_a_forward_is_one_call_and_returns_watched_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fitting_model("llama", num_hidden_layers=4)
    target = Target(model)
    target.capture_layers([0, 2, 3])
    expected = target.features(torch.tensor(tiny_prompts((11,)))).float()
    assert not torch.equal(*expected.chunk(4, -1)[::3]), "the last layer's is from before the final norm"
    prepare(target)
    calls = calls_of_kernels(monkeypatch)
    logits, found = forward(target, 11)
    assert calls == [11]
    for part, whole in zip(found.float().chunk(4, -1), expected.chunk(4, -1), strict=True):
        assert float((part - whole).norm()) < 0.03 * float(whole.norm())
    assert torch.equal(logits, target.lm_logits(target.features_of(found)))
    eager, changing = fitting_model("llama"), fitting_model("llama", **rotary("dynamic"))
    eager.config._attn_implementation = "eager"
    for target in (Target(eager), Target(changing)):  # attention and angles that are not theirs
        assert prepare(target) is target.plain_stack


@in_each_set
@pytest.mark.parametrize("first", [True, False])
def test_the_kernels_layers_of_a_head_are_those_of_torch(first: bool) -> None:
    """Two of EAGLE-3's, with the norm before or after the residual."""
    target = Target(fitting_model("llama", num_hidden_layers=3))
    config = EagleConfig.for_target(target, layout="eagle3", num_layers=2, norm_before_residual=first, norm_output=True)
    owner = EagleHead(config).to(torch.bfloat16)
    stack = prepare(owner)
    assert isinstance(stack, CpuStack)
    count, visible_after = 9, torch.rand(2, 9, 9).gt(0.3) | torch.eye(9, dtype=torch.bool)
    slots = torch.stack([torch.randperm(20)[:count] for _ in range(2)])
    visible = torch.zeros(2, count, 20, dtype=torch.bool)
    visible.scatter_(2, slots[:, None].expand(-1, count, -1), visible_after)
    positions, embeds, x = torch.randint(0, 700, (2, count)), *torch.randn(2, 2, count, 128).bfloat16()

    def cache() -> SlotCache:
        made = SlotCache(SimpleNamespace(num_hidden_layers=2), 2, 20)
        made.set_write_slots(slots, None, 20)
        return made

    with torch.inference_mode():
        here = cache()
        out, captured, _ = stack(StackInputs(x, positions, {"all": visible}, here, range(2), embeds))
        found = list(captured)
        there, angles, expected = cache(), owner.rotary_emb(x, positions), []
        for index, layer in enumerate(owner.layers):
            inputs, name = ((x,), cache_argument(type(layer))) if index else ((embeds, x), "cache")
            x = layer(*inputs, attention_mask=visible[:, None], position_embeddings=angles, **{name: there})
            expected.append(x)
        found.append(out)
        expected.append(owner.norm(x))
    found += here.keys_and_values(stack.key_heads, stack.width, x.dtype)
    expected += there.keys_and_values(stack.key_heads, stack.width, x.dtype)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).float().norm()) < 0.02 * float(other.float().norm())


@in_each_set
@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_a_hook_on_a_layers_module_is_called(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fitting_model("llama", num_hidden_layers=4)
    layer = model.model.layers[1]
    halve = {"forward": lambda module, args, out: 0.5 * out, "forward_pre": lambda module, args: (0.5 * args[0],)}
    handle = getattr(layer.mlp, f"register_{kind}_hook")(halve[kind])
    target = Target(model)
    plain = logits_through_cache(target)
    prepare(target)
    calls = calls_of_kernels(monkeypatch)
    hooked = logits_through_cache(target)
    assert float((hooked - plain).norm()) < 0.03 * float(plain.norm()) and not calls
    handle.remove()
    model(torch.tensor([[1, 2]]), output_hidden_states=True)  # transformers leaves hooks that only look
    fast = logits_through_cache(target)
    assert len(calls) == 2 and float((hooked - fast).norm()) > 0.1 * float(plain.norm())


@in_each_set
def test_threads_run_forwards_of_one_target_at_once() -> None:
    model = fitting_model("qwen3", num_hidden_layers=4)
    target = Target(model)
    prepare(target)
    target.capture_layers([1])

    @torch.inference_mode()
    def features(longest: int) -> list[Tensor]:
        return [forward(target, length)[1] for length in range(1, longest)]

    lengths = [6, 20, 12, 28]
    expected = list(map(features, lengths))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(features, lengths))
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.usefixtures("builtin_target_dir", "each_set")
def test_exact_from_the_file_emits_what_the_plain_loop_emits() -> None:
    """No draft changes a token of the built-in model. That of bf16 weights: the test of heads in fp8, below."""
    decoder = FuzzyDecoder.from_pretrained("smollm2-135m", "shipped+lookup", tree=TreeShape(5, 6, 16))
    assert isinstance(decoder.target.stack, CpuStack)
    assert {weight.ggml_type for weight in packed_products(decoder.target.model)} == {3, 8}, (
        "Q4_1, and embeddings of Q8_0"
    )
    plain = FuzzyDecoder(decoder.target, NoDrafter(decoder.target.vocab_size))
    prompts = ["Why is the sky blue?", "Name ten rivers."]
    out = decoder.generate(prompts, max_new_tokens=16, do_sample=False)
    assert out.sequences == plain.generate(prompts, max_new_tokens=16, do_sample=False).sequences
    assert out.stats.acceptance_length > 1.5


@in_each_set
def test_a_heads_weights_become_fp8_where_they_are_ours(tmp_path: Path) -> None:
    target, shape = Target(fitting_model("llama")), TreeShape(3, 3, 8)
    head = EagleHead(EagleConfig.for_target(target, final_norm=True, draft_vocab_size=64))
    initialise_from(head, target)
    path = save_head(tmp_path / "head", head, target.fingerprint())
    prepare(target)  # products whose rows do not depend on their number
    decoder = FuzzyDecoder(target, NoDrafter(VOCAB))
    made = decoder.load_drafter(path, shape)
    assert isinstance(made, EagleDrafter) and isinstance(made.head.stack, CpuStack)
    assert made.describe()["weights"] == "fp8"
    plain = FuzzyDecoder(target, NoDrafter(VOCAB), quantize=False).load_drafter(path, shape)
    handed = EagleDrafter(copy.deepcopy(head), target, shape)
    assert decoder.load_drafter(handed) is handed
    for other in (plain, handed):
        assert isinstance(other, EagleDrafter) and "weights" not in other.describe()
    torch.manual_seed(0)
    features = torch.randn(1, 9, 128).bfloat16()

    def logits(drafter: EagleDrafter) -> Tensor:
        session = EagleSession(drafter, DraftRequest(1, 20))
        tell(session, torch.arange(9)[None], features, torch.tensor([9]))
        return drafter.q_logits(session.root_output[:, None], session.vocabulary).float()

    with torch.inference_mode():
        expected, found = logits(plain), logits(made)
    assert 1e-3 < float((found - expected).norm() / expected.norm()) < 0.1  # of random weights, through five products
    options: dict[str, Any] = dict(max_new_tokens=16, do_sample=False)
    wanted = decoder.generate(tiny_prompts((9,)), **options).sequences
    for drafter in (made, plain):  # whatever is drafted
        assert decoder.generate(tiny_prompts((9,)), drafter=drafter, **options).sequences == wanted
    restore(made.head)
    for name, value in plain.head.state_dict().items():
        assert made.head.state_dict()[name].shape == value.shape


@in_each_set
def test_slots_that_are_not_there_and_numbers_that_are_none_are_not_hidden() -> None:
    model = fitting_model("llama")
    target = Target(model)
    prepare(target)
    tokens, visible = torch.tensor([[1, 2]]), torch.ones(1, 2, 4, dtype=torch.bool)
    for first in (2, 3, -1):
        cache = target.new_cache(1, 4)
        slots = torch.tensor([[first, first + 1]])
        cache.set_write_slots(slots, None, 4)
        with nullcontext() if first == 2 else pytest.raises(IndexError, match="a cache with 4 slots"):
            target.forward(tokens, slots.clamp_min(0), visible, cache)
    assert not logits_through_cache(target).isnan().any()
    with torch.no_grad():
        model.model.embed_tokens.weight[:] = torch.nan
    assert logits_through_cache(target).isnan().all()


@in_each_set
def test_long_prompts_are_read_by_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fitting_model("llama")
    target = Target(model)
    prepare(target)
    prompt = (tiny_prompts((60,))[0] * 3)[:150]
    assert target.cache_bytes_per_token > 0  # found by a forward of its own
    calls = calls_of_kernels(monkeypatch)
    expected = FuzzyDecoder(target, NoDrafter(VOCAB)).generate([prompt], max_new_tokens=4, do_sample=False)
    assert calls == [150, 1, 1, 1]
    monkeypatch.setattr(stack_module, "MAX_SLOTS", dict.fromkeys(SETS, 100))
    calls.clear()
    found = FuzzyDecoder(target, NoDrafter(VOCAB)).generate([prompt], max_new_tokens=4, do_sample=False)
    assert calls == [1, 1, 1], "the prompt's forward is not among them"
    assert len(found.sequences[0]) == len(expected.sequences[0]) == 4
