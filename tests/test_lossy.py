"""Lossy rules in decoding: phases of the text, a GPU's numerics, what drafters and answers are reported to be."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer import FsdError, FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import GraftedDrafter, LMDrafter, LookupDrafter
from fsd_infer.engine import Request, decode
from fsd_infer.engine.ngrams import copied_ngrams, coverage, kinds, repeated_ngrams
from fsd_infer.rules import Exact, Rule, Tilted, TokenOrigin, parse_rule
from fsd_infer.rules.texts import markers, markers_of
from tests.families import VOCAB, tiny_head, tiny_model, tiny_prompts


class Vocabulary:
    """A tokenizer as far as phases look at it."""

    def __init__(self, opening: int, closing: int) -> None:
        self.ids = {"<think>": opening, "</think>": closing}

    def get_vocab(self) -> dict[str, int]:
        return self.ids


def in_phase(text: list[int], opening: int, closing: int) -> bool:
    """Is the token after a text in the phase."""
    seen = [token for token in text if token in (opening, closing)]
    return bool(seen) and seen[-1] == opening


def test_outside_the_phase_each_token_is_the_targets_own() -> None:
    """At temperature 0 by the target's argmax after the very text that was emitted; phases begin and end in it."""
    model, prompt = tiny_model("llama"), [5, 9, 11]
    target = Target(model)
    drafter = LMDrafter(Target(tiny_model("llama", seed=1)), target, TreeShape(4, 2, 8))
    opening = decode(target, drafter, parse_rule("exact"), Request([prompt], 4)).sequences[0][2]
    phased = parse_rule("tilted:0.2:exact_ngram_size=0:min_p=0:only_in=think")
    target.tokenizer = Vocabulary(opening, 96)
    free = decode(target, drafter, phased, Request([prompt], 64)).sequences[0]
    closing = next(token for token in free[8:] if token != opening)  # ends the phase soon
    target.tokenizer = Vocabulary(opening, closing)
    record = decode(target, drafter, phased, Request([prompt], 96)).records[0]
    states = [in_phase([*prompt, *record.tokens[:place]], opening, closing) for place in range(len(record.tokens))]
    assert any(states) and not all(states)
    for place, lossy in enumerate(states):
        if not lossy:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *record.tokens[:place]]])).logits[0, -1]
            assert record.tokens[place] == int(logits.argmax())
            assert not record.relaxed[place] and record.spent[place] == 0 and record.sources[place] != TokenOrigin.GATE
    assert any(gate for gate, lossy in zip(record.relaxed, states) if lossy)


def test_how_phases_are_written() -> None:
    assert markers("think") == ("<think>", "</think>")
    assert markers("[THINK]..[/THINK]") == ("[THINK]", "[/THINK]")
    assert parse_rule("tilted:2:only_in=<a>..</a>").only_in == "<a>..</a>"
    for wrong in ("", "a..a", "..", "a..", "<think>"):
        with pytest.raises(FsdError, match="only_in"):
            parse_rule(f"tilted:only_in={wrong}")
    rules = [parse_rule("exact"), parse_rule("tilted:only_in=think")]
    assert markers_of(rules, Vocabulary(3, 4)) == {"think": (3, 4)}
    with pytest.raises(FsdError, match="'</think>' is not a token"):
        markers_of(rules, Vocabulary(3, -1))
    with pytest.raises(FsdError, match="no tokenizer"):
        markers_of(rules, None)


STEP = 2.0**-8  # of bf16, relative


def noisy(values: Tensor) -> Tensor:
    """The values, each off by up to a step."""
    return values * (1 + STEP * (2 * torch.rand_like(values, dtype=torch.float32) - 1)).to(values.dtype)


class NoisyTarget(Target):
    """In bf16, where a hundred logits of a toy tie often."""

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        logits, features = super().forward(*args, **options)
        return noisy(logits).bfloat16(), noisy(features)


LOSSY = [
    *("fuzzy:js:0.3", "fuzzy-strict:tv:0.3", "tilted:1", "draft-only", "random:0.5", "cactus:0.3", "cascade-token:0.5"),
    *("ensemble:0.5", "lenient:0.5", "relaxed", "threshold:0.3", "typical"),
]


BUDGETS = [(f"{rule}:budget=0.5", kind) for rule, kind in zip(LOSSY, cycle(["lm", "graft"]))]


@pytest.mark.parametrize(("rule", "kind"), [("exact", "lm"), ("exact", "graft"), *BUDGETS])
@pytest.mark.filterwarnings("ignore:lm samples its drafts")
def test_every_row_gets_its_answer_within_its_budget(rule: str, kind: str) -> None:
    """By chains that are drawn from a small LM, or at temperature 0 by trees of a head and a lookup."""
    target = NoisyTarget(tiny_model("llama"))
    greedy = kind == "graft"
    if kind == "lm":
        drafter: Any = LMDrafter(NoisyTarget(tiny_model("llama")), target, TreeShape.chain(3))
    else:
        drafter = GraftedDrafter(tiny_head(target, draft_vocab_size=40), LookupDrafter(VOCAB))
    prompts, new = tiny_prompts((5, 9, 7)), 12
    outcome = decode(target, drafter, parse_rule(rule), Request(prompts, new, greedy))
    assert [len(answer) for answer in outcome.sequences] == [new] * len(prompts)
    for record, row in zip(outcome.records, outcome.stats.rows, strict=True):
        assert len(record.spent) == len(record.sources) == len(record.relaxed) == new
        assert min(record.spent) >= 0 and sum(record.spent) <= (0.5 if "budget" in rule else 0) + 1e-6
        assert 1 <= row.target_forwards < new
    if rule == "exact" and greedy:
        for prompt, answer in zip(prompts, outcome.sequences, strict=True):
            text = torch.tensor([prompt + answer])
            logits = target.model(input_ids=text).logits[0, len(prompt) - 1 : -1]
            emitted = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            # noise and rounding of both, at their worst
            assert bool((logits.amax(1) - emitted <= 4 * STEP * logits.abs().amax(1)).all())


@pytest.mark.parametrize(("rule", "sampled"), [(Exact(), False), (Tilted(0.5, 0.0), False), (Exact(), True)])
def test_requests_report_what_the_drafter_and_the_target_say_of_the_answer(rule: Rule, sampled: bool) -> None:
    model = tiny_model("llama")
    target, small = Target(model), Target(tiny_model("llama", seed=3))
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 3]]
    made = FuzzyDecoder(target, LMDrafter(small, target, TreeShape.chain(3))).generate(
        prompts, rule, max_new_tokens=12, seed=1, eos_token_id=None, do_sample=sampled
    )
    for prompt, answer, row, record in zip(prompts, made.sequences, made.stats.rows, made.records, strict=True):
        found = [(*emission.first_choice, emission.depth) for emission in record.emissions if emission.first_choice]
        assert row.drafts.summary()["count"] == len(found) > (0 if sampled else 4)
        if sampled:
            continue  # a drawn draft is nobody's first choice
        place, forwards = 0, 0
        with torch.inference_mode():
            theirs, ours = (
                m(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1) for m in (model, small.model)
            )
        regrets = []
        while (place := place + 1) < len(answer):  # a round begins after the answer's first ``place`` tokens
            forwards += 1
            for depth in range(3):
                at = len(prompt) + place - 1
                draft = int(ours[at].argmax())
                regrets.append((0, float(theirs[at].max() - theirs[at, draft]), depth + 1))
                if draft != answer[place] or (place := place + 1) == len(answer):
                    break
        assert forwards == record.target_forwards
        assert [choice[::2] for choice in found] == [choice[::2] for choice in regrets]
        torch.testing.assert_close(
            [nats for _, nats, _ in found], [nats for _, nats, _ in regrets], rtol=1e-4, atol=1e-5
        )


SHARES = [
    ("abcdefg", "abcdx", 1 / 2, 0.0, "nnncn"), ("xyz", "ababab", 0.0, 1 / 3, "nnnnnr"),
    ("abab", "ababab", 2 / 3, 1 / 3, "nnncnc"), ("abc", "abc", None, None, "nnn"), ("", "", None, None, ""),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "answer", "copied", "repeated", "labels"), SHARES)
def test_shares_and_kinds(prompt: str, answer: str, copied: float | None, repeated: float | None, labels: str) -> None:
    assert copied_ngrams(prompt, answer) == (None if copied is None else pytest.approx(copied))
    assert repeated_ngrams(answer) == (None if repeated is None else pytest.approx(repeated))
    assert [kind[0] for kind in kinds(prompt, answer)] == list(labels)


def test_extractive_coverage() -> None:
    """The example of greedy fragments: two words, one word, and a word that the source lacks."""
    assert coverage("the cat sat on the mat".split(), "cat sat near the mat".split()) == pytest.approx(4 / 5)
    assert coverage(["a"], []) is None and coverage([], ["a"]) == 0.0
