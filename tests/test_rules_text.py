"""Rules as text and as objects: what is read, what is refused by name, and former names."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fsd_bench.worth
import fsd_infer.rules
from fsd_core.errors import FsdError
from fsd_core.former import Renamed
from fsd_infer.drafters.free import FreeDrafter
from fsd_infer.drafters.recycle import RecycleDrafter
from fsd_infer.drafters.session import DraftSession
from fsd_infer.engine.state import DecodeState
from fsd_infer.rules import (
    Exact,
    Fuzzy,
    LossyRule,
    OutputDistribution,
    RandomGate,
    Rule,
    RuleInputs,
    Tilted,
    TokenHistory,
    parse_rule,
)
from fsd_infer.rules.parameters import FORMER, parameter
from tests.tree_rounds import INF, tree_round

BAD: dict[str, str] = {
    "fuzzy:js:-0.1": "threshold must be at least 0, not -0.1",
    "fuzzy:js:nan": "threshold must be a number that fits a float, not 'nan'",
    "fuzzy:js:1e-400": "threshold must be a number that fits a float, not '1e-400'",
    "fuzzy:js:much": "threshold must be a number that fits a float, not 'much'",
    "fuzzy:js:0.3:budget=-1": "budget must be at least 0",
    "fuzzy:js:0.3:gate=both": "gate_on must be 'raw' or 'processed', not 'both'",
    "fuzzy:js:0.3:size=2": "cannot use 'size=2'; fuzzy takes divergence, threshold",
    "fuzzy:tv:2": "threshold must be at most 1, the largest tv, not 2",
    "fuzzy-strict:top_k_js:20:0.7": "at most 0.6931, the largest top_k_js:20, not 0.7",
    "fuzzy:jensen:0.3": "unknown divergence 'jensen'", "fuzy:js:0.3": "unknown rule 'fuzy'.*Did you mean 'fuzzy'",
    "random": "rate is missing", "random:1.1": "rate must be between 0 and 1",
    "random:0.1:rate=0.2": "rate is given twice", "exact:0.3": "block must be true or false",
    "tilted:0": "kl_coef must be at least 0.001, not 0", "tilted:1:min_p=inf": "min_p must be between 0 and 1, not inf",
    "tilted:1:no_repeat=4": "no_repeat is now exact_ngram_size",
    "tilted:1:exact_ngram_size=2.5": "exact_ngram_size must be a whole number, not '2.5'",
    "tilted:1:exact_ngram_size=-1": "exact_ngram_size must be between 0 and 64, not -1",
    "tilted:2:gate=30": "gate must be at most 0.6931, the largest js, not 30",
    "tilted:2:match_temperature=0.3": "match_temperature adapts kl_coef",
    "tilted:deviation_cost=-1": "deviation_cost must be between 0 and 1e",
    "lenient:0": "lenience must be above 0 and at most 1, not 0.0",
    "threshold:2": "single must be between 0 and 1, not 2", "threshold:acc=0": "acc must be",
    "typical:-1": "epsilon must be at least 0", "relaxed:3:2": "delta must be between 0 and 1",
    "cactus:inf": "delta must be between 0 and 1e.06, not inf", "cascade-token:1.1": "alpha must be at most 1",
    "ensemble:0": "weight must be", "fly:0": "window must be between 1 and 1024",
    "fly:6:-1": "entropy must be at least 0", "asd:-1": "gap must be at least 0",
    "asd:1:1.5": "mismatches must be a whole number, not '1.5'",
    "asd:budget=-1": "budget must be at least 0", "mars:-0.1": "margin must be at least 0",
}  # fmt: skip


@pytest.mark.parametrize("spec", BAD)
def test_bad_parameters_are_named(spec: str) -> None:
    with pytest.raises(FsdError, match=BAD[spec]):
        parse_rule(spec)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Fuzzy("js", math.nan), "threshold must be at least 0, not nan"),
    (lambda: Fuzzy("js", "0.3"), "threshold must be a number"),  # type: ignore[arg-type]
    (lambda: Exact()(tree_round(0, uniforms=None)), "above temperature 0 needs uniforms"),
    (lambda: RandomGate(0.5)(tree_round(0, greedy=True, uniforms=None)), "draws at random at every temperature"),
])  # fmt: skip
def test_bad_arguments_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(FsdError, match=message):
        make()


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("fuzzy", Fuzzy()), ("fuzzy:threshold=0.2:divergence=tv", Fuzzy("tv", 0.2)),
        ("fuzzy:js:0.3:budget=2:gate=processed", Fuzzy("js", 0.3, budget=2.0, gate_on="processed")),
        ("fuzzy:js:0.3:budget=none", Fuzzy("js", 0.3)), ("fuzzy:top_k_js:20:0.3", Fuzzy("top_k_js:20", 0.3)),
        ("fuzzy:kl_qp:inf", Fuzzy("kl_qp", INF)), ("random:0.25", RandomGate(0.25)),
    ],
)  # fmt: skip
def test_rules_as_text(spec: str, rule: Rule) -> None:
    assert parse_rule(spec) == rule
    assert parse_rule(rule) is rule


@pytest.mark.parametrize(("former", "now"), FORMER.items())
def test_former_names_of_parameters(former: str, now: str, unsaid: None) -> None:
    """As text, as keywords and as attributes, with one warning for all."""
    with pytest.warns(FutureWarning, match=f"{former} of a rule .* it is now {now}") as said:
        assert parse_rule(f"tilted:{former}=1") == parse_rule(f"tilted:{now}=1") == Tilted(**{former: 1})
        assert getattr(Tilted(**{now: 1}), former) == 1
    assert len(said) == 1


def test_a_rule_may_have_a_parameter_of_any_name_but_the_shared_ones(unsaid: None) -> None:
    """A parameter ``nats`` is no budget."""

    @dataclass(frozen=True)
    class Unsure(LossyRule):
        nats: float = parameter(0.5, low=0)

        def output(self, inputs: RuleInputs) -> OutputDistribution:
            return OutputDistribution.passing(inputs, -INF).where(inputs.entropy >= self.nats)

    assert Unsure().max_nats == INF and Unsure(budget=2.0).max_nats == 2.0
    assert Unsure(nats=0.0)(tree_round(0, greedy=True)).spent.sum() > 0.5
    with pytest.warns(FutureWarning, match="nats of a rule works until .*: it is now max_nats"):
        assert Fuzzy(budget=2.0).nats == 2.0  # type: ignore[attr-defined]


INPUTS: Any = RuleInputs(tree_round(0, greedy=True))
STATE: Any = object.__new__(DecodeState)  # with what its properties read
STATE.texts = TokenHistory([[7, 9, 8]])
ONE_NAT: Any = OutputDistribution.biased(INPUTS, lambda: torch.ones_like(INPUTS.logprob_gap))
# a former name as its warning has it, and a use of it that is true: one of each way to keep a name
USES: dict[str, Callable[[], bool]] = {
    "RuleInputs.regret": lambda: INPUTS.regret is INPUTS.logprob_gap,
    "RuleInputs.best": lambda: torch.equal(INPUTS.best(2), INPUTS.topk_log_p(2)),
    "OutputDistribution.lifted": lambda: (
        OutputDistribution.lifted(INPUTS, lambda: INPUTS.logprob_gap).logit_bias is INPUTS.logprob_gap
    ),
    "OutputDistribution.without_copies(inputs, n)": lambda: torch.equal(
        ONE_NAT.without_copies(INPUTS, 1).logit_bias, ONE_NAT.without_copies(1).logit_bias
    ),
    "DecodeState.lengths": lambda: STATE.lengths.tolist() == [2],
    "DecodeState.roots": lambda: STATE.roots.tolist() == [8],
    "RecycleDrafter(most=...)": lambda: RecycleDrafter(9, most=3).max_contexts == 3,
    "fsd_infer.rules.Law": lambda: fsd_infer.rules.Law is OutputDistribution,  # type: ignore[attr-defined]
    "fsd_bench.Settings": lambda: fsd_bench.Settings is fsd_bench.RunOptions,
    "fsd_bench.worth.Shaped": lambda: fsd_bench.worth.Shaped is fsd_bench.worth.RuleOnShape,
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_former_names_are_read_with_one_warning(name: str, unsaid: None) -> None:
    with pytest.warns(FutureWarning) as said:
        assert USES[name]()
    assert [str(each.message).split(" works")[0] for each in said] == [name]


def test_every_former_member_has_a_present_one() -> None:
    kinds = Renamed.__subclasses__()
    for kind in kinds:
        kinds += kind.__subclasses__()
        for present in vars(kind).get("former_members", {}).values():
            assert re.search(rf"(?s)\b{present}\b.*\b{present}\b", inspect.getsource(kind)) or "." in present, present


def test_a_class_written_with_former_names_works(unsaid: None) -> None:
    with pytest.warns(FutureWarning) as said:

        class Always(LossyRule):
            def law(self, evidence: RuleInputs) -> OutputDistribution:
                return OutputDistribution.passing(evidence, -math.inf)

            def tilt(self, greedy: bool) -> float:
                return 0.5

        class Own(DraftSession):
            def facts(self, tree: Any, logits: Any, verdict: Any) -> list[Any]:
                return ["mine"]

            def append(self, rows: Any) -> None:
                pass

            def draft(self, roots: Any) -> Any:
                return None

            def select(self, rows: Any) -> None:
                self.kept = rows
                super().select(rows)  # type: ignore[misc]

        class Bigrams(FreeDrafter):
            reach = 2

        mine: Any = Own()
        mine.keep_rows([1])
        assert mine.kept == [1] and mine.remembers is False
    told = [str(each.message).split(" works")[0] for each in said]
    assert {"Always.law", "Always.tilt", "Own.facts", "Own.append", "DraftSession.select", "Bigrams.reach"} <= {*told}
    round = tree_round(0, greedy=True)
    assert Always()(round).accepted.tolist() == parse_rule("fuzzy:js:inf")(round).accepted.tolist()
    assert Always().draft_bonus(True) == 0.5 and Bigrams.context_length == 2
    assert Own.feedback is vars(Own)["facts"] and Own.extend_on_host is vars(Own)["append"]
