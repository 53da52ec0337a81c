"""The engine keeps transformers' meaning of a request (processors, stopping, streaming, seeds) and reports honestly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList, SynthIDTextWatermarkingConfig

import fsd_infer
from fsd_core.errors import ContextLengthError, NonFiniteLogitsError, UnknownNameError, VocabularyMismatchError
from fsd_infer import FsdError, FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import GraftedDrafter, LMDrafter, NoDrafter
from fsd_infer.drafters.loading import choose_trees
from fsd_infer.engine import round as engine_round
from fsd_infer.rules import RandomGate, TokenOrigin, parse_rule
from fsd_infer.targets.token_ids import left_pad
from fsd_infer.trees.policy import PricePolicy, policy_store
from fsd_infer.trees.tree import Nodes
from tests.families import VOCAB, EndsIn, OracleDrafter, drafter_of, reference, tiny_head, tiny_model, tiny_prompts

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
    expected = reference(target.model, [first, second])
    main = drafter_of(kind, target, TreeShape(depth, 1, depth + 1))
    # the first row gets ahead by ten tokens at once, the second follows as the first has four left
    leaps = Leaps(target, {first[0]: 10, second[0]: len(second) + length - 12})
    out = FuzzyDecoder(target, GraftedDrafter(main, leaps, nodes=16)).generate(
        [first, second], max_new_tokens=length, do_sample=False
    )
    assert out.sequences == expected and not leaps.at


class Leaps(OracleDrafter):
    """Silent but for ten right drafts in each text once it is as long as ``at`` has it for its first token."""

    name, max_nodes, max_depth = "leaps", 11, 10

    def __init__(self, target: Target, at: dict[int, int]) -> None:
        super().__init__(target)
        self.at = at

    def tree(self, text: list[int], path: list[int]) -> Nodes:
        drafts = path if len(text) >= self.at.get(text[0], 999) else []
        if drafts:
            del self.at[text[0]]
        count = len(drafts) + 1
        return [text[-1], *drafts], [max(0, node - 1) for node in range(count)], [-0.01 * node for node in range(count)]


def test_several_answers_per_prompt_are_shaped_as_by_generate(model: Any, target: Target) -> None:
    several, prompts = 3, tiny_prompts()[:2]
    ids, mask = left_pad(prompts, 0, CPU)
    options: dict[str, Any] = dict(do_sample=True, max_new_tokens=6, num_return_sequences=several, top_k=0)
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


def test_stopping_criteria_emit_no_token_too_many(model: Any, oracle: FuzzyDecoder) -> None:
    for prompt in tiny_prompts():
        plain = reference(model, [prompt])[0]
        for stop in {plain[3], plain[10], plain[20]}:
            expected = plain[: plain.index(stop) + 1]
            criteria = StoppingCriteriaList([EndsIn([stop])])
            out = oracle.generate([prompt], max_new_tokens=24, do_sample=False, stopping_criteria=criteria)
            assert out.sequences == [expected]
            assert out.stats.rows[0].finish_reason == "stop"


def test_records_name_every_tokens_source(oracle: FuzzyDecoder) -> None:
    out = oracle.generate(tiny_prompts(), rule=RandomGate(0.5), max_new_tokens=30, do_sample=False, seed=1)
    for record, row in zip(out.records, out.stats.rows, strict=True):
        assert len(record.tokens) == len(record.sources) == len(record.relaxed) == len(record.spent) == row.new_tokens
        assert record.sources[0] == TokenOrigin.TARGET
        gates = [s == TokenOrigin.GATE for s in record.sources]
        assert row.gate_accepted_fraction == pytest.approx(sum(gates) / len(gates))
        assert all(open_ for open_, gate in zip(record.relaxed, gates, strict=True) if gate)
        assert row.divergence_spent == pytest.approx(sum(record.spent))
        assert all(nats == 0 for nats, open_ in zip(record.spent, record.relaxed, strict=True) if not open_)
    assert out.stats.divergence_spent > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_prompt_may_have_a_rule_of_its_own(temperature: float, target: Target) -> None:
    """One batch; at temperature 0 each answer is that of its rule alone, and budgets are each rule's own."""
    decoder = FuzzyDecoder(target, tiny_head(target))
    prompts, options = tiny_prompts(), {"max_new_tokens": 24, "temperature": temperature, "do_sample": temperature > 0}
    rules = ["exact", "tilted:0.1:exact_ngram_size=3", "tilted:0.1:budget=9", "draft-only"][: len(prompts)]
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
    assert row.acceptance_length == pytest.approx((row.new_tokens - 1) / row.target_forwards)
    assert out.stats.acceptance_length == pytest.approx(row.acceptance_length)
    with pytest.warns(FutureWarning, match="it is now acceptance_length"):
        assert (out.stats.tau, row.tau) == (out.stats.acceptance_length, row.acceptance_length)


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
        *(
            (x, {}, FsdError, "dense and holds values")
            for x in (torch.zeros(1, 2, device="meta"), torch.eye(2).to_sparse())
        ),
        ({"input_ids": None}, {}, FsdError, "got None"),
        ([[1, 2]], dict(users=5), FsdError, "users is a list of texts"),
    ],
)
def test_bad_requests_are_refused_by_name(
    prompts: Any, options: dict[str, Any], error: type[FsdError], words: str, oracle: FuzzyDecoder
) -> None:
    with pytest.raises(error, match=words):
        oracle.generate(prompts, max_new_tokens=2, **options)


def test_a_small_lm_that_does_not_fit_is_refused(target: Target) -> None:
    with pytest.raises(VocabularyMismatchError, match="120"):
        LMDrafter(Target(tiny_model("llama", vocab_size=120)), target)
    with pytest.raises(FsdError, match="depth"):
        LMDrafter(target, target, TreeShape.chain(0))


def test_the_rules_time_is_no_part_of_the_forwards(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule takes longer over drafts than without: counted as the forward's, that would be the price of nodes."""
    drafter, now, seen = choose_trees(drafter_of("lookup", target), target), [0.0], list[Any]()
    apply_rules = engine_round.accept

    def slow(*arguments: Any) -> Any:
        now[0] += 5.0
        return apply_rules(*arguments)

    monkeypatch.setattr(engine_round, "accept", slow)
    monkeypatch.setattr(PricePolicy, "update", lambda self, report: seen.append(report.seconds))
    policy_store(drafter.learner, target, None).clock = lambda: now[0]
    FuzzyDecoder(target, drafter).generate(tiny_prompts((5,)), max_new_tokens=4, do_sample=False)
    assert seen[:2] == [(0.0, 0.0, 5.0)] * 2
