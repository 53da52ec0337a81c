"""vLLM's processor without vLLM: edited logits against the distributions of the same rules, over rows as vLLM lays them
out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsd_infer.integrations import vllm
from fsd_infer.integrations.vllm import FuzzyRules, RuleRequest
from fsd_infer.rules import RuleInputs, parse_rule
from fsd_infer.rules.tilted import INITIAL_KL_COEF
from tests.output_probs import output_probs
from tests.simulated_device import SIM, SimulatedDevice
from tests.tree_rounds import text_round

V, SLOTS, LONGEST = 11, 30, 64
RULES = [
    "tilted:1:exact_ngram_size=0:min_p=0", "tilted:0.4:exact_ngram_size=2:min_p=0.1", "lenient:0.4", "typical:0.2:0.5",
    "relaxed:3:0.4", "threshold:0.2:0.6:exact_ngram_size=1", "cactus:0.5:exact_ngram_size=2",
    "mars:0.7:exact_ngram_size=1", "asd:1:budget=3", "exact",
]  # fmt: skip


@dataclass
class Params:
    """What is read of vLLM's SamplingParams."""

    temperature: float = 0.0
    extra_args: dict[str, Any] | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass
class Server:
    """vLLM's slots and rows, by hand."""

    drafts: int = 5
    sampling: str = "greedy"
    method: str = "eagle"
    device: str | torch.device = "cpu"
    texts: dict[int, list[int]] = field(default_factory=dict)
    chains: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = torch.zeros(SLOTS, LONGEST, dtype=torch.int32, device=self.device)
        self.lengths = torch.zeros(3, SLOTS, dtype=torch.int32, device=self.device)  # total, prompt, prefill
        buffers = [SimpleNamespace(gpu=values) for values in (self.tokens, *self.lengths)]
        names = ("all_token_ids", "total_len", "prompt_len", "prefill_len")
        states = SimpleNamespace(device=torch.device(self.device), max_num_reqs=SLOTS, **dict(zip(names, buffers)))
        speculative = SimpleNamespace(
            num_speculative_tokens=self.drafts, draft_sample_method=self.sampling, method=self.method
        )
        self.rules = FuzzyRules(SimpleNamespace(speculative_config=speculative), states)

    def add(self, slot: int, params: Params, text: list[int], drafts: list[int], resumed: int = 0) -> None:
        self.lengths[:, slot] = torch.tensor([len(text), len(text), len(text) + resumed])
        self.rules.add_request(slot, params)
        self.rules.apply_staged_writes()
        self.grow(slot, text, drafts)

    def grow(self, slot: int, text: list[int], drafts: list[int]) -> None:
        self.texts[slot], self.chains[slot] = text, drafts
        self.tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        self.lengths[0, slot] = len(text)

    def context(self, slots: list[int]) -> Any:
        """vLLM's, rows in the order of ``slots``."""
        rows = [(slot, place) for slot in slots for place in range(len(self.chains[slot]) + 1)]
        ids = [[self.texts[slot][-1], *self.chains[slot]][place] for slot, place in rows]
        columns = {"idx_mapping": slots, "expanded_local_pos": [place for _, place in rows], "input_ids": ids}
        made = {name: torch.tensor(values, dtype=torch.int32).to(self.device) for name, values in columns.items()}
        lengths = [len(self.texts[slot]) + len(self.chains[slot]) for slot in slots]
        bounds = {"idx_mapping_np": np.array(slots), "seq_lens_upper_bound_np": np.array(lengths)}
        return SimpleNamespace(**made, **bounds)

    def step(self, logits: Tensor, slots: list[int]) -> Tensor:
        """The edited copy of ``logits`` [R, V]."""
        return self.rules.apply(logits.clone(), self.context(slots))


class NothingHappens(TorchDispatchMode):
    """Refuses every operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was launched")


@pytest.fixture(autouse=True)
def any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_check_version", lambda: None)
    for name in ("FSD_VLLM_RULE", "FSD_VLLM_MOST"):
        monkeypatch.delenv(name, raising=False)


def distribution_of(rule: str, temperature: float, text: list[int], drafts: list[int], logits: Tensor) -> Tensor:
    """[n, V] by the rule on one request's chain; at temperature 0 its choice, one-hot."""
    parsed, round = parse_rule(rule), text_round(text, drafts, logits / (temperature or 1.0), temperature == 0)
    if temperature:
        inputs = RuleInputs(round)
        return output_probs(parsed.restricted_output(inputs), inputs)[0]
    verdict, found = parsed(round), logits.argmax(-1)
    found[: verdict.accepted[0] + 1] = verdict.tokens[0, : verdict.accepted[0] + 1]
    return torch.nn.functional.one_hot(found, V)


def requests(seed: int) -> list[tuple[Params, str, list[int], list[int]]]:
    """One per slot: rules, temperatures and chains of 0 to 5 drafts in turn; few tokens, so n-grams repeat."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 4, (count,), generator=generator).tolist()

    found = []
    for slot in range(SLOTS):
        rule, temperature = RULES[slot % len(RULES)], (0.0, 0.7, 1.0)[slot // len(RULES)]
        temperature = 0.0 if parse_rule(rule).greedy_only else temperature
        found.append((Params(temperature, {"rule": rule}), rule, tokens(4 + slot), tokens((slot + seed) % 6)))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_edited_logits_are_the_distributions(seed: int) -> None:
    """Every rule at temperatures 0, 0.7 and 1 in one batch, in an order of rows that is not that of the slots."""
    server, asked, generator = Server(), requests(seed), torch.Generator().manual_seed(seed)
    for slot, (params, _, text, drafts) in enumerate(asked):
        server.add(slot, params, text, drafts)
    order = torch.randperm(SLOTS, generator=generator).tolist()
    counts = [len(asked[slot][3]) + 1 for slot in order]
    logits = torch.randn(sum(counts), V, generator=generator) * 2
    logits[::3, 5] = -torch.inf  # a grammar forbids a token
    edited = server.step(logits, order)
    assert torch.equal(edited.isinf(), logits.isinf())
    changed = 0
    for slot, own, after in zip(order, logits.split(counts), edited.split(counts), strict=True):
        params, rule, text, drafts = asked[slot]
        wanted = distribution_of(rule, params.temperature, text, drafts, own)
        if params.temperature:
            torch.testing.assert_close((after / params.temperature).double().softmax(-1), wanted, atol=1e-5, rtol=1e-4)
        else:
            assert_same_walk(after, wanted, drafts)
        changed += int(not torch.equal(own, after))
        assert rule != "exact" or torch.equal(own, after)
    assert changed > 6


def assert_same_walk(after: Tensor, wanted: Tensor, drafts: list[int]) -> None:
    """The same choices [n, V] as far as the walk comes; nothing after that is emitted."""
    choices = wanted.argmax(-1).tolist()
    reached = next((place for place, draft in enumerate(drafts) if choices[place] != draft), len(drafts))
    assert after.argmax(-1).tolist()[: reached + 1] == choices[: reached + 1]


def test_a_batch_without_rules_is_not_touched() -> None:
    server = Server()
    server.add(0, Params(), [1, 2], [3])
    server.add(1, Params(0.7, {"rule": "exact"}, top_p=0.9), [1, 2], [3])
    server.add(2, Params(0.7, {"rule": "tilted:inf"}), [1, 2], [3])
    logits, context = torch.randn(4, V), server.context([0, 1])
    with NothingHappens():
        assert server.rules.apply(logits, context) is logits
    assert torch.equal(server.step(logits[:2], [2]), logits[:2])


WITHOUT_WAITS = [
    "tilted:0.4:exact_ngram_size=2:min_p=0.1", "tilted", "tilted:match_temperature=0.3", "tilted:1:budget=2",
    "relaxed:3:0.4", "fly:2:0.1", "asd:1", "mars",
]  # fmt: skip


@pytest.mark.parametrize("rule", WITHOUT_WAITS)
def test_nothing_waits_for_the_device(rule: str) -> None:
    for temperature in (0.0,) if parse_rule(rule).greedy_only else (0.0, 0.7):
        with SimulatedDevice() as device:
            server = Server(device=SIM, method="ngram")
            for slot in range(3):
                server.add(slot, Params(temperature, {"rule": rule}), [1, 2, 3], [3] * (slot + 1))
            logits, context = torch.randn(9, V).to(SIM), server.context([0, 1, 2])
            device.waits.clear()
            assert server.rules.apply(logits, context) is logits and not device.waits


@pytest.mark.parametrize(("method", "only_in", "text", "drafts", "choices"), [
    ("eagle", None, [1, 2], [2, 2], [2, 2, 7]),
    ("eagle", None, [1, 2], [-1, -1], [7, 7, 7]),  # vLLM's placeholders
    ("ngram", None, [1, 2], [2, 2], [7, 7, 7]),  # the last token, where its n-gram drafter has none
    ("ngram", None, [1, 2], [3, 2], [3, 7, 7]),
    ("eagle", "think", [1, 2], [3, 4], [7, 7, 7]),
    ("eagle", "think", [9, 2], [3, 4], [3, 4, 7]),  # 9 and 10 are the tags
    ("eagle", "think", [9, 10, 2], [3, 4], [7, 7, 7]),
    ("eagle", "think", [9, 2], [10, 4], [10, 7, 7]),
    ("eagle", "<think>..</think>", [9, 2], [3, 4], [3, 4, 7]),
    ("eagle", "plan", [9, 2], [3, 4], [7, 7, 7]),  # the model has no such tokens
])  # fmt: skip
def test_which_drafts_are_favoured(
    method: str, only_in: str | None, text: list[int], drafts: list[int], choices: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(vllm, "_vocabulary", lambda model: {"<think>": 9, "</think>": 10})
    server, logits = Server(method=method), torch.zeros(3, V)
    logits[:, 7] = 0.5
    rule = "tilted:0.1:exact_ngram_size=0:min_p=0" + (f":only_in={only_in}" if only_in else "")
    server.add(0, Params(0.0, {"rule": rule}), text, drafts)
    assert server.step(logits, [0]).argmax(-1).tolist() == choices


@pytest.mark.parametrize("options", ["match_temperature=0.4", "kl_coef=0.3:budget=2"])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_spent_lives_in_slots(seed: int, options: str) -> None:
    """As in the engine: step by step the same tokens, under an adaptive KL coefficient and under a budget."""
    generator, asked = (
        torch.Generator().manual_seed(seed),
        Params(0.0, {"rule": f"tilted:exact_ngram_size=0:min_p=0:{options}"}),
    )
    rule = RuleRequest.of(asked).rule
    server, text, kl_excess, spent = Server(), [1, 2], torch.zeros(1), torch.zeros(1)
    for step in range(10):
        drafts = torch.randint(0, V, (5,), generator=generator).tolist()
        logits = torch.rand(6, V, generator=generator) * 2
        if step == 0:
            server.add(3, asked, text, drafts)
        server.grow(3, text, drafts)
        left = torch.full((1,), torch.inf if rule.budget is None else rule.budget) - spent
        verdict = rule(text_round(text, drafts, logits, True, kl_excess=kl_excess, budget_left=left))
        count = int(verdict.accepted[0]) + 1
        assert server.step(logits, [3]).argmax(-1).tolist()[:count] == verdict.tokens[0, :count].tolist()
        text = text + verdict.tokens[0, :count].tolist()
        spent = spent + verdict.spent.sum(1)
        server.grow(3, text, [])
        server.step(logits[:1], [3])  # accounts for the step before
        if verdict.allowed is not None:
            kl_excess = (kl_excess + verdict.spent.sum(1) - verdict.allowed).clamp_min(-INITIAL_KL_COEF)
            torch.testing.assert_close(server.rules.kl_excess[3:4], kl_excess.float(), atol=1e-4, rtol=1e-4)
    assert float(spent) > (0 if rule.budget is None else 0.5 * rule.budget)
    server.add(3, asked, [1, 2], [3])
    assert float(server.rules.kl_excess[3]) == 0, "of the request before"


# rule, and the choices at each step of an answer of a target that says 7: drafts 3 and 4 have a gap of 0.5
STEPS = [
    ("budget=1.2", [([], [3, 4, 7]), ([3, 4], [7, 7, 7])]),
    ("exact_start=3", [([], [7, 7, 7]), ([5, 5], [7, 4, 7]), ([5, 5, 5], [3, 4, 7])]),
]


@pytest.mark.parametrize(("option", "steps"), STEPS)
def test_a_slot_begins_anew_with_each_request(option: str, steps: list[tuple[list[int], list[int]]]) -> None:
    """After a preemption, which forgets what was spent, no budget is left."""
    server, logits = Server(), torch.zeros(3, V)
    logits[:, 7] = 0.5
    params = Params(0.0, {"rule": f"tilted:0.1:exact_ngram_size=0:min_p=0:{option}"})
    for _ in range(2):
        server.add(3, params, [1, 2], [3, 4])
        for answer, choices in steps:
            server.grow(3, [1, 2, *answer], [3, 4])
            assert server.step(logits, [3]).argmax(-1).tolist() == choices
    if "budget" in option:
        server.add(3, params, [1, 2], [3, 4], resumed=2)
        assert torch.equal(server.step(logits, [3]), logits)


@pytest.mark.parametrize(("params", "message"), [
    (Params(extra_args={"rule": "tilted:-1"}), "kl_coef must be at least 0.001"),
    (Params(extra_args={"rule": "fuzzy:js:0.3"}), "'fuzzy' needs the drafter's distribution"),
    (Params(0.7, {"rule": "tilted"}, top_p=0.9), "top_p = 1, top_k = 0 and min_p = 0"),
    (Params(0.7, {"rule": "fly"}), "'fly' needs temperature 0"),
    (Params(extra_args={"rule": "tilted", "only_in": "code"}), "only_in: a parameter of rules now"),
    (Params(extra_args={"rules": "tilted:1"}), "rules: no field of these rules"),
    (Params(extra_args={"quality": 0.9}), "quality: no field of these rules"),
    (Params(extra_args={"rule": "tilted:only_in=a..a"}), "two different tokens"),
])  # fmt: skip
def test_requests_that_make_no_sense_are_refused(params: Params, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FuzzyRules.validate_params(params)
    with pytest.raises(ValueError, match="draft_sample_method = 'greedy'"):
        Server(sampling="probabilistic")


# the most that a server allows: what may be asked of it, and what not
ALLOWED = [
    ("tilted:1:budget=9",
     ["exact", "tilted:1:exact_ngram_size=2:budget=9", "tilted:inf:budget=0", "tilted:1:budget=9:only_in=think"],
     ["tilted", "tilted:2", "tilted:0.9:budget=1", "tilted:1:exact_ngram_size=0:budget=1", "typical",
      "tilted:2:min_p=0:budget=1"]),
    ("tilted", ["tilted", "tilted:4:deviation_cost=1:exact_start=64", "tilted:deviation_cost=2"],
     ["tilted:4", "tilted:2:deviation_cost=1", "tilted:match_temperature=0.1"]),
    ("tilted:match_temperature=0.3", ["tilted:match_temperature=0.2"], ["tilted:match_temperature=0.4", "tilted:4"]),
]  # fmt: skip


@pytest.mark.parametrize(("most", "allowed", "refused"), ALLOWED)
def test_a_server_may_set_a_default_and_a_limit(
    most: str, allowed: list[str], refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSD_VLLM_MOST", most)
    for rule in allowed:
        assert RuleRequest.of(Params(extra_args={"rule": rule})).rule == parse_rule(rule)
        monkeypatch.setenv("FSD_VLLM_RULE", rule)
        assert RuleRequest.of(Params()).rule == parse_rule(rule)
    for rule in refused:
        with pytest.raises(ValueError, match=f"this server allows {most}"):
            RuleRequest.of(Params(extra_args={"rule": rule}))
    monkeypatch.setenv("FSD_VLLM_RULE", refused[0])
    Server()  # whose requests may name the rules that it allows
    with pytest.raises(ValueError, match=f"this server allows {most}"):
        RuleRequest.of(Params())
    for name, other in (("FSD_VLLM_RULE", "FSD_VLLM_MOST"), ("FSD_VLLM_MOST", "FSD_VLLM_RULE")):
        monkeypatch.setenv(name, "fuzzyy")
        monkeypatch.delenv(other)
        with pytest.raises(ValueError, match=f"{name}: unknown rule 'fuzzyy'"):
            Server()
        monkeypatch.setenv(other, "exact")
