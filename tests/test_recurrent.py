"""Targets that keep a state, alone or beside attention: trees verified by replay, and states committed by path."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, DynamicCache

from fsd_bench.probe import Probe
from fsd_core.errors import FsdError, ModelLoadError
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.backends.cpu.packing import onednn_packs
from fsd_infer.device.cache import SlotCache, cache_argument
from fsd_infer.device.states import STATE, Branches
from fsd_infer.drafters import LMDrafter, NoDrafter
from fsd_infer.engine import Request, decode
from fsd_infer.engine.callback import Callback
from fsd_infer.recurrent.recurrences import Convolution, DeltaRule, Duality, Selective
from fsd_infer.request.prompts import prefill_prompts
from fsd_infer.rules import parse_rule
from fsd_infer.targets.prefixes import PrefixCache
from tests.covering import fast_only
from tests.families import RECURRENT, VOCAB, drafter_of, reference, tiny_model, tiny_prompts
from tests.sim_graphs import SimRecorder
from tests.simulated_device import SIM, SimulatedDevice
from tests.test_device_waits import NEW, PROMPTS

KINDS = ["mamba", "mamba2", "kimi_linear", "qwen3_5_text", "lfm2"]  # each recurrence, alone or beside attention
ALL = fast_only([*KINDS, *(name for name in RECURRENT if name not in KINDS)], KINDS)


@cache
def model_of(family: str) -> Any:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    return tiny_model(family)


@pytest.mark.parametrize("family", ALL)
def test_greedy_equals_generate(family: str) -> None:
    """Chains and trees, of heads and lookups, in ragged batches whose rows leave one after the other."""
    check_greedy(model_of(family))


def check_greedy(model: Any) -> None:
    target, prompts = Target(model), tiny_prompts((5, 13, 1))
    limits = dict(max_new_tokens=16, do_sample=False)
    expected = reference(model, prompts, **limits)
    assert len({token for row in expected for token in row}) > 2, "degenerate model: the comparison would be hollow"
    for name, least_tau in {"none": 1.0, "oracle": 2.0, "fused": 1.0, "lookup+recycle": 1.0}.items():
        decoder = FuzzyDecoder(target, drafter_of(name, target, TreeShape(3, 3, 8)))
        assert decoder.generate(prompts[:1], **limits).sequences == expected[:1], f"{name}, batch 1"
        batch = decoder.generate(prompts, **limits)
        assert batch.sequences == expected, f"{name}, ragged batch"
        assert batch.stats.acceptance_length >= least_tau, f"{name}: drafts that are right were not accepted"


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "short": ("mamba2", dict(n_groups=1, conv_kernel=2, use_conv_bias=False, use_bias=True)),
    "three": ("mamba", dict(conv_kernel=3, use_conv_bias=False, use_bias=True)),
    "rotary": ("granitemoehybrid", dict(position_embedding_type="rope")),
    "no positions": ("zamba2", dict(use_mem_rope=False)), "one expert": ("jamba", dict(num_experts=1)),
    "dense": ("qwen3_next", dict(num_experts=0, mlp_only_layers=[0, 1], linear_num_key_heads=4)),
    "normed": ("falcon_h1", dict(mamba_rms_norm=True)), "convs": ("lfm2", dict(conv_L_cache=4, conv_bias=True)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_families(case: str) -> None:
    family, options = OPTIONS[case]
    check_greedy(tiny_model(family, **options))


def _states(cache: SlotCache, row: int) -> dict[Any, Tensor]:
    return {key: state for key, state in cache.saved(row, 1).items() if key[0] == STATE}


class States(Callback):
    """Keeps each row's states after each round."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, dict[Any, Tensor]]] = []

    def on_start(self, state: Any) -> None:
        self.state = state

    def on_round(self, report: Any) -> None:
        for row, number in enumerate(report.prompt_indices):
            self.found.append((number, int(self.state.texts.lengths[row]) - 1, _states(self.state.cache, row)))


@pytest.mark.parametrize("family", fast_only(["mamba", "mamba2", "qwen3_5_text", "lfm2", "zamba2"], KINDS))
def test_committed_states_are_those_of_a_fresh_prefill(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64: of ours, in pieces, and of transformers' own cache."""
    monkeypatch.setattr("fsd_infer.device.states.PIECE", 5)
    target = Target(tiny_model(family).double())
    prompts, states = tiny_prompts((5, 13)), States()
    decoder = FuzzyDecoder(target, drafter_of("oracle", target))
    answers = decoder.generate(prompts, max_new_tokens=12, do_sample=False, callbacks=[states]).sequences
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    assert len(states.found) > 6
    for number, length, found in states.found:
        if length > len(texts[number]):  # the last round may have read beyond the answer's end
            continue
        ids, fresh = torch.tensor([texts[number][:length]]), target.new_cache(1, length)
        with torch.inference_mode():
            prefill_prompts(target, fresh, ids, torch.tensor([length]))
            theirs = DynamicCache(config=target.config)
            target.model(ids, use_cache=True, **{cache_argument(type(target.model)): theirs})
        for key, state in _states(fresh, 0).items():
            torch.testing.assert_close(found[key], state, rtol=1e-9, atol=1e-12)
        own = [state for key, state in found.items() if key[1][1] > 1]  # the first call of a layer is its convolution
        kept = [part for layer in theirs.layers for part in getattr(layer, "recurrent_states", {}).values()]
        for state, other in zip(own, [part for part in kept if part is not None], strict=True):
            torch.testing.assert_close(state.float(), other.float(), rtol=1e-4, atol=1e-5)


def test_each_recurrence_reads_a_tree_as_it_reads_its_paths() -> None:
    torch.manual_seed(0)
    rows, count, path = 2, 6, [0, 1, 3, 5]
    parents = torch.tensor([0, 0, 0, 1, 1, 3]).expand(rows, -1)
    ancestors = torch.eye(count, dtype=torch.bool).repeat(rows, 1, 1)
    for node in range(1, count):
        ancestors[:, node] |= ancestors[:, int(parents[0, node])]
    real = dict(dtype=torch.float64)

    def normal(*size: int) -> Tensor:
        return torch.randn(rows, count, *size, **real)

    def decay(*size: int) -> Tensor:
        return -torch.rand(rows, count, *size, **real)

    cases: list[tuple[Any, tuple[Tensor, ...]]] = [
        (Convolution(torch.randn(5, 4, **real), torch.randn(5, **real), "silu"), (normal(5),)),
        (Duality(), (decay(4), normal(4, 3), normal(2, 5), normal(2, 5))),
        (Selective(-torch.rand(3, 5, **real)), (-decay(3), normal(3), normal(5), normal(5))),
        (DeltaRule(), (normal(4, 5), normal(4, 5), normal(4, 3), decay(4, 1), -decay(4))),
        (DeltaRule(), (normal(4, 5), normal(4, 5), normal(4, 3), decay(4, 5), -decay(4))),
    ]
    for recurrence, inputs in cases:
        state = torch.randn_like(recurrence.initial(inputs))
        outputs = recurrence.tree(state, inputs, Branches(ancestors, 3))
        along = tuple(x[:, path] for x in inputs)
        one_by_one, reached = [], state
        for place in range(len(path)):
            step = tuple(x[:, place : place + 1] for x in along)
            output, reached = recurrence.chain(reached, step, torch.tensor([1, 1]))
            one_by_one.append(output)
        torch.testing.assert_close(outputs[:, path], torch.cat(one_by_one, 1))
        torch.testing.assert_close(recurrence.chain(state, along, torch.tensor([4, 4]))[1], reached)
        torch.testing.assert_close(recurrence.chain(state, along, torch.tensor([0, 4]))[1][0], state[0])


RECORDED = [("mamba2", "fused"), ("qwen3_5_text", "lookup")]
SLOWLY = [("mamba2", "lookup"), ("qwen3_5_text", "fused"), ("mamba", "fused"), ("mamba", "lookup"), ("lfm2", "fused")]


@pytest.mark.parametrize(("family", "kind"), fast_only([*RECORDED, *SLOWLY], RECORDED))
def test_recorded_rounds_answer_as_eager_ones(family: str, kind: str, device: SimulatedDevice) -> None:
    """A second request takes the first one's tensors, whose states begin at zero again."""
    expected = reference(model_of(family), PROMPTS, max_new_tokens=2 * NEW)
    target = Target(tiny_model(family).to(SIM))
    drafter = drafter_of(kind, target, TreeShape(2, 3, 7))
    recorder = SimRecorder(device)
    for model in (target, drafter):
        model.use_graphs(recorder)
    for _ in range(2):
        answers = decode(target, drafter, parse_rule("exact"), Request(PROMPTS, 2 * NEW, True)).sequences
        assert answers == expected and target.recorded.refused is None
    assert recorder.replayed > 0


def test_a_kept_text_is_read_on_where_it_ends() -> None:
    """A prompt that begins with all of it reads the rest; one that leaves it earlier reads everything."""
    model, (prompt, more) = model_of("qwen3_5_text"), tiny_prompts((20, 6))
    target = Target(model)
    target.prefixes = PrefixCache(1 << 24)
    decoder = FuzzyDecoder(target, drafter_of("oracle", target))
    limits = dict(max_new_tokens=12, do_sample=False)
    for _ in range(2):  # the second time a text of 20 tokens is too short for a kept one of more
        (answer,) = decoder.generate([prompt], **limits).sequences
    turn = [*prompt, *answer, *more]
    again = decoder.generate([turn, [*prompt, *more]], **limits)
    assert again.stats.cached_tokens[0] >= len(prompt) + len(answer) - 1 and again.stats.cached_tokens[1] == 0
    assert again.sequences == reference(model, [turn, [*prompt, *more]], **limits)


def test_a_probe_leaves_the_states_of_its_context_alone() -> None:
    probe = Probe(Target(model_of("mamba2")), context=8, largest=4)
    assert torch.equal(probe(3), probe(3))


def test_beams_and_recurrent_small_models_are_refused_by_name() -> None:
    target, plain = Target(model_of("mamba2")), Target(tiny_model("llama"))
    with pytest.raises(FsdError, match="recurrent layers.*num_beams=1"):
        FuzzyDecoder(target, NoDrafter(VOCAB)).generate([[1, 2, 3]], num_beams=2, max_new_tokens=2, do_sample=False)
    with pytest.raises(ModelLoadError, match="recurrent layers.*draft with a small model without"):
        LMDrafter(target, plain)


@pytest.mark.parametrize("family", ["mamba2", "zamba2"])
def test_steps_that_only_prompts_limit_are_refused(family: str) -> None:
    limits: dict[str, Any] = {"mamba2": {"time_step_limit": (0.0, 0.1)}, "zamba2": {"time_step_min": 0.01}}
    with pytest.raises(ModelLoadError, match="limits its time steps.*time_step_limit"):
        Target(tiny_model(family, **limits[family]))


OTHERS: dict[str, dict[str, Any]] = {
    "minimax": dict(num_local_experts=4, head_dim=8, block_size=4, layer_types=["linear_attention", "full_attention"]),
    "zaya": {}, "rwkv": dict(attention_hidden_size=32), "xlstm": {},
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_states_that_no_code_here_knows_are_refused_by_name(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = AutoConfig.for_model(family, vocab_size=VOCAB, **sizes, **OTHERS[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelLoadError, match="keeps? a state.*Use another target"):
        Target(model)


def test_packed_weights_leave_those_that_the_layer_reads_itself(tmp_path: Path) -> None:
    """Mamba multiplies by the weight of its step projection, past the layer's forward."""
    if not onednn_packs():
        pytest.skip("this machine packs no weights")
    tiny_model("mamba", scale=1.5).bfloat16().save_pretrained(tmp_path)
    decoder = FuzzyDecoder.from_pretrained(tmp_path, "lookup", device="cpu")
    ids = torch.tensor([tiny_prompts((9,))[0]])
    mixer = decoder.target.decoder.layers[0].mixer
    assert type(mixer.in_proj) is not torch.nn.Linear and type(mixer.dt_proj) is torch.nn.Linear
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        logits = decoder.target.model(ids).logits
        torch.testing.assert_close(logits.float(), plain(ids).logits, rtol=0.1, atol=0.1 * float(logits.abs().max()))


@pytest.mark.parametrize("family", ["mamba", "qwen3_5_text"])
def test_training_and_other_caches_run_transformers_own_code(family: str) -> None:
    model = model_of(family).requires_grad_(False)  # as a target's is: torch multiplies otherwise, and rounds otherwise
    ids = torch.tensor(tiny_prompts((9,)))
    with torch.no_grad():
        before = model(ids).logits
        target = Target(model)
        assert torch.equal(model(ids).logits, before) and torch.equal(model(ids, use_cache=False).logits, before)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(ids).logits, before) and Target(copied).is_recurrent
    assert target.is_recurrent and not Target(tiny_model("llama")).is_recurrent
    assert target.cache_bytes(3, 10) == 3 * target.cache_bytes(1, 10) > 0
    assert (target.cache_bytes(1, 20) == target.cache_bytes(1, 10)) == (family == "mamba"), "states grow with no text"
