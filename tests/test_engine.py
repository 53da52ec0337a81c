"""The engine keeps transformers' meaning of a request (processors, stopping, streaming, seeds) and reports honestly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats
from transformers import StoppingCriteria, StoppingCriteriaList, SynthIDTextWatermarkingConfig

import fsd_infer
from fsd_infer import Exact, FsdError, FuzzyDecoder, LMDrafter, NoDrafter, RandomGate, Target, TreeShape
from fsd_infer.drafters import Drafter, DraftRequest, DraftSession, GraftedDrafter
from fsd_infer.errors import ContextLengthError, NonFiniteLogitsError, UnknownNameError, VocabularyMismatchError
from fsd_infer.rules import Source, parse_rule
from fsd_infer.targets.token_ids import left_pad
from fsd_infer.tree import DraftTree
from tests.families import VOCAB, OracleDrafter, noisy_model, reference, tiny_head, tiny_model, tiny_prompts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def target(model: Any) -> Target:
    return Target(model)


@pytest.fixture
def oracle(target: Target) -> FuzzyDecoder:
    return FuzzyDecoder(target, OracleDrafter(target))


def test_processors_that_know_the_row_are_given_the_requests(model: Any, oracle: FuzzyDecoder) -> None:
    """A tree's nodes come to a processor as rows; what it holds for each row of the request must not go by those."""
    prompts, allowed = [[5, 6, 7, 8], [9, 10, 11, 12]], [list(range(0, VOCAB, 2)), list(range(1, VOCAB, 2))]
    asked = set()

    def of_row(row: int, text: torch.Tensor) -> list[int]:
        asked.add((row, text[0].item()))
        return allowed[row]

    ids = torch.tensor(prompts)
    for name, value in {
        "prefix_allowed_tokens_fn": of_row, "encoder_repetition_penalty": 4.0, "encoder_no_repeat_ngram_size": 1,
    }.items():  # fmt: skip
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, name: value}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 4:].tolist()
        asked.clear()
        assert oracle.generate(prompts, **options).sequences == expected, name
        assert oracle.generate(prompts[:1], **options).sequences == expected[:1], name
    several = dict(max_new_tokens=8, do_sample=True, num_return_sequences=2, encoder_no_repeat_ngram_size=1, seed=1)
    for row, answer in enumerate(oracle.generate(prompts, **several).sequences):
        assert not set(answer) & set(prompts[row // 2])
    oracle.generate(prompts, max_new_tokens=12, do_sample=False, prefix_allowed_tokens_fn=of_row)
    assert asked == {(0, 5), (1, 9)}


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("kind", ["head", "lm"])
def test_a_row_that_leaps_at_its_neighbours_end_stays_within_the_caches(kind: str, depth: int, target: Target) -> None:
    """What a row emits less than another is padded after its text: by more than its own drafter's depth in a graft."""
    first, second, length = [5, 6, 7, 8, 9, 10, 11, 12], [9, 10, 11], 24
    texts = [prompt + reference(target.model, [prompt])[0] for prompt in (first, second)]
    shape, small = TreeShape(depth, 1, depth + 1), Target(tiny_model("llama", seed=5))
    main = LMDrafter(small, target, shape) if kind == "lm" else tiny_head(target, shape)
    # the first row gets ahead by ten tokens at once, the second follows as the first has four left
    leaps = _Leaps(texts, {0: 10, 1: len(second) + length - 12})
    out = FuzzyDecoder(target, GraftedDrafter(main, leaps, nodes=16)).generate(
        [first, second], max_new_tokens=length, do_sample=False
    )
    assert out.sequences == [text[-length:] for text in texts]
    assert leaps.taken == [0, 1]


class _Leaps(Drafter):
    """Silent but for ten right drafts in each row where its text has the length given for it."""

    name, max_nodes, max_depth = "leaps", 11, 10

    def __init__(self, texts: list[list[int]], at: dict[int, int]) -> None:
        self.texts, self.at = texts, at
        self.taken: list[int] = []

    def start(self, first_tokens: torch.Tensor, request: DraftRequest) -> _LeapsSession:
        return _LeapsSession(self)


class _LeapsSession(DraftSession):
    def __init__(self, drafter: _Leaps) -> None:
        self.drafter, self.rows, self.lengths = drafter, [0, 1], [1, 1]

    def extend(self, tokens: torch.Tensor, features: torch.Tensor, counts: torch.Tensor) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, counts.tolist(), strict=True)]

    def draft(self, roots: torch.Tensor) -> DraftTree:
        made = []
        for row, length, root in zip(self.rows, self.lengths, roots.tolist(), strict=True):
            drafts = []
            if row not in self.drafter.taken and length >= self.drafter.at[row]:
                self.drafter.taken.append(row)
                drafts = self.drafter.texts[row][length : length + 10]
            count = len(drafts) + 1
            scores = [-0.01 * depth for depth in range(count)]
            made.append(([root, *drafts], [max(0, node - 1) for node in range(count)], scores))
        return DraftTree.of_lists(made, VOCAB, roots.device)

    def select(self, rows: torch.Tensor) -> None:
        self.rows, self.lengths = ([values[i] for i in rows.tolist()] for values in (self.rows, self.lengths))


def test_custom_generate_hook_returns_what_generate_returns(model: Any, target: Target) -> None:
    ids, mask = left_pad(tiny_prompts(), 0, CPU)
    options: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=9)
    options["pad_token_id"] = 0
    expected = model.generate(ids, **options)
    options |= dict(custom_generate=fsd_infer.generate, drafter=OracleDrafter(target))
    assert torch.equal(model.generate(ids, rule="exact", **options), expected)
    output = model.generate(ids, rule=Exact(), return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, expected)
    assert output.stats.new_tokens == sum(row.new_tokens for row in output.stats.rows) > 0


def test_several_answers_per_prompt_are_shaped_as_by_generate(model: Any, target: Target) -> None:
    several, prompts = 3, tiny_prompts()[:2]
    ids, mask = left_pad(prompts, 0, CPU)
    options: dict[str, Any] = dict(do_sample=True, max_new_tokens=6, num_return_sequences=several)
    expected = model.generate(ids, attention_mask=mask, **options)
    decoder = FuzzyDecoder(target, OracleDrafter(target))
    out = decoder.generate(prompts, seed=0, **options)
    assert [len(answer) for answer in out.sequences] == [6] * len(expected)
    assert len(out.texts) == len(out.records) == len(out.stats.rows) == len(expected)
    assert len({tuple(answer) for answer in out.sequences[:several]}) > 1, "answers to one prompt are drawn apart"
    hook = dict(custom_generate=fsd_infer.generate, drafter=decoder.drafter, seed=0)
    ours = model.generate(ids, attention_mask=mask, **hook, **options)
    assert ours.shape == expected.shape and torch.equal(ours[:, : ids.shape[1]], expected[:, : ids.shape[1]])
    assert ours[:, ids.shape[1] :].tolist() == out.sequences


def test_a_neighbour_with_a_long_prompt_leaves_an_answer_its_length(model: Any, target: Target) -> None:
    """Context 256: there is room for 6 tokens after the long prompt, and for all 40 after the short one."""
    long, short = tiny_prompts((250, 3))
    decoder = FuzzyDecoder(target, OracleDrafter(target))
    alone = [decoder.generate([prompt], max_new_tokens=40, do_sample=False).sequences[0] for prompt in (long, short)]
    assert [len(answer) for answer in alone] == [6, 40]
    for prompts, expected in (([long, short], alone), ([short, long], alone[::-1])):
        out = decoder.generate(prompts, max_new_tokens=40, do_sample=False)
        assert out.sequences == expected
        assert [row.finish_reason for row in out.stats.rows] == ["length", "length"]


SAMPLED_REQUESTS: dict[str, dict[str, Any]] = {
    "top_k": dict(temperature=2.0, top_k=5),
    "top_p": dict(temperature=1.5, top_p=0.8),
    "penalty": dict(temperature=1.5, repetition_penalty=1.5, top_k=20),
}
SAMPLES = 1200


@pytest.fixture(scope="module", params=SAMPLED_REQUESTS)
def sampled(request: pytest.FixtureRequest, model: Any) -> tuple[dict[str, Any], np.ndarray]:
    """A request, and the answers that transformers samples to it."""
    options = {"max_new_tokens": 4, "do_sample": True, "top_k": 0, **SAMPLED_REQUESTS[request.param]}
    prompt = tiny_prompts((7,))[0]
    torch.manual_seed(1)
    return options, model.generate(torch.tensor([prompt] * SAMPLES), **options)[:, len(prompt) :].numpy()


@pytest.mark.parametrize("kind", ["oracle", "lm", "lm that stops"])
def test_sampled_law_equals_generate(kind: str, sampled: tuple[dict[str, Any], np.ndarray], target: Target) -> None:
    """Law of the third token given the prompt, ours against ``generate``: a two-sample chi-square test.

    False-alarm probability 1e-5 per case with fixed seeds; nine cases.
    """
    options, theirs = sampled
    stop = 0.03 if kind == "lm that stops" else 0.0  # so flat are these models: after one draft or after two
    drafter = (
        OracleDrafter(target)
        if kind == "oracle"
        else LMDrafter(Target(noisy_model("llama")), target, TreeShape.chain(3, stop))
    )
    out = FuzzyDecoder(target, drafter).generate(tiny_prompts((7,)) * SAMPLES, seed=2, **options)
    assert out.stats.target_forwards < 3 * SAMPLES, "no draft was ever accepted: the test would be hollow"
    assert_one_law(np.array(out.sequences), theirs)


def assert_one_law(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Ids [samples, 4] of two decoders: a chi-square test of each position but the first, 1e-5 false alarms in all."""
    for position in range(1, 4):
        table = np.stack([np.bincount(ids[:, position], minlength=VOCAB) for ids in (ours, theirs)])
        common = table[:, table.sum(0) >= 10]
        rest = table.sum(1, keepdims=True) - common.sum(1, keepdims=True)
        table = np.concatenate([common, rest + 1], axis=1)
        assert scipy_stats.chi2_contingency(table).pvalue > 1e-5 / 3


class _Tokens(StoppingCriteria):
    """Stops once the text ends with a given token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def test_stopping_criteria_emit_no_token_too_many(model: Any, oracle: FuzzyDecoder) -> None:
    for prompt in tiny_prompts():
        plain = reference(model, [prompt])[0]
        for stop in {plain[3], plain[10], plain[20]}:
            expected = plain[: plain.index(stop) + 1]
            criteria = StoppingCriteriaList([_Tokens(stop)])
            out = oracle.generate([prompt], max_new_tokens=24, do_sample=False, stopping_criteria=criteria)
            assert out.sequences == [expected]
            assert out.stats.rows[0].finish_reason == "stop"


def test_records_name_every_tokens_source(oracle: FuzzyDecoder) -> None:
    out = oracle.generate(tiny_prompts(), rule=RandomGate(0.5), max_new_tokens=30, do_sample=False, seed=1)
    for record, row in zip(out.records, out.stats.rows, strict=True):
        assert len(record.tokens) == len(record.sources) == len(record.gates) == len(record.spent) == row.new_tokens
        assert record.sources[0] == Source.TARGET
        gates = [s == Source.GATE for s in record.sources]
        assert row.gate_accepted_fraction == pytest.approx(sum(gates) / len(gates))
        assert all(open_ for open_, gate in zip(record.gates, gates, strict=True) if gate)
        assert row.divergence_spent == pytest.approx(sum(record.spent))
        assert all(nats == 0 for nats, open_ in zip(record.spent, record.gates, strict=True) if not open_)
    assert out.stats.divergence_spent > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_prompt_may_have_a_rule_of_its_own(temperature: float, target: Target) -> None:
    """One batch; at temperature 0 each answer is that of its rule alone, and budgets are each rule's own."""
    decoder = FuzzyDecoder(target, tiny_head(target))
    prompts, options = tiny_prompts(), {"max_new_tokens": 24, "temperature": temperature, "do_sample": temperature > 0}
    rules = ["exact", "tilted:0.1:novel=3", "tilted:0.1:budget=9", "draft-only"][: len(prompts)]
    out = decoder.generate(prompts, rule=rules, seed=0, **options)
    assert out.stats.rule["rows"] == [parse_rule(rule).describe() for rule in rules]
    spent = [row.divergence_spent for row in out.stats.rows]
    assert spent[0] == 0 and spent[1] > 0 and 0 < spent[2] <= 9
    if temperature == 0:
        for row, (prompt, rule) in enumerate(zip(prompts, rules)):
            assert out.sequences[row] == decoder.generate([prompt], rule=rule, **options).sequences[0]
        ended = decoder.generate(prompts, rule=rules, on_tokens=lambda row, _: row == 0, **options)
        assert ended.sequences[1:] == out.sequences[1:]  # rules stay with their rows when one leaves
    for some in (["exact", "tilted:1"], []):
        with pytest.raises(FsdError, match="one rule, or one per prompt|one per prompt"):
            decoder.generate(prompts[:3], rule=some, **options)


def test_log_likelihood_and_counts(model: Any, oracle: FuzzyDecoder) -> None:
    prompt = tiny_prompts()[2]
    out = oracle.generate([prompt], max_new_tokens=24, do_sample=False, measure_log_likelihood=True)
    row = out.stats.rows[0]
    ids = torch.tensor([prompt + out.sequences[0]])
    log_p = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])
    assert row.mean_log_likelihood == pytest.approx(float(log_p.mean()), abs=1e-4)
    assert row.tau == pytest.approx((row.new_tokens - 1) / row.target_forwards)
    assert out.stats.tau == pytest.approx(row.tau)


def test_broken_logits_are_named() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="the target's logits"):
        FuzzyDecoder(Target(model), NoDrafter(VOCAB)).generate([[1, 2, 3]], max_new_tokens=4, do_sample=False)


SYNTHID = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "words"),
    [
        ([[1, 2]], dict(rule="exakt"), UnknownNameError, "exakt.*exact"),
        ([], {}, FsdError, "no prompts"),
        ("text without a tokenizer", {}, FsdError, "tokenizer"),
        ([[1] * 256], {}, ContextLengthError, "256"),
        ([[1, 2], [3]], dict(streamer=SimpleNamespace(put=print, end=list)), FsdError, "one prompt"),
        ([[1, 2]], dict(do_sample=True, watermarking_config=SYNTHID), FsdError, "SynthID.*cannot be applied to a"),
        *(([[1, 2], [3, token]], {}, FsdError, f"from 0 to {VOCAB - 1}, got {token}") for token in (-1, VOCAB)),
        *(([row], {}, FsdError, "") for row in ([1.5], ["1", 2], [True], [None], [], [[1]], [1, 10**30])),
        *((whole, {}, FsdError, "") for whole in (b"bytes", {"role": "user", "content": "x"}, None, 5, 1.5, {}, set())),
        *((x, {}, FsdError, "") for x in (torch.tensor(3), torch.zeros(1, 1, 1), torch.tensor([0.5]), object())),
    ],
)
def test_bad_requests(
    prompts: Any, options: dict[str, Any], error: type[FsdError], words: str, oracle: FuzzyDecoder
) -> None:
    with pytest.raises(error, match=words):
        oracle.generate(prompts, max_new_tokens=2, **options)


def test_a_small_lm_that_does_not_fit_is_refused(target: Target) -> None:
    with pytest.raises(VocabularyMismatchError, match="120"):
        LMDrafter(Target(tiny_model("llama", vocab_size=120)), target)
    with pytest.raises(FsdError, match="depth"):
        LMDrafter(target, target, TreeShape.chain(0))
