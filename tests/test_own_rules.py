"""What rules of one's own return: anything but distributions is refused; when their functions are called."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer import FsdError
from fsd_infer.rules import (
    AcceptanceTest,
    LossyRule,
    OutputDistribution,
    RoundInput,
    RuleInputs,
    VocabRows,
)
from fsd_infer.trees.tree import DraftTree
from tests.tree_rounds import tree_round

REFUSED: dict[str, tuple[Callable[[RuleInputs], Any], str]] = {
    "the former order": (
        lambda inputs: OutputDistribution(inputs.has_q, inputs.logprob_gap),  # type: ignore[arg-type]
        "rule 'own': OutputDistribution takes inputs first now, not a Tensor",
    ),
    "the former order, restricted": (
        lambda inputs: OutputDistribution(inputs.has_q, inputs.logprob_gap).where(inputs.has_q),  # type: ignore[arg-type]
        "OutputDistribution takes inputs first now, not a Tensor",
    ),
    "a test by its former name": (lambda inputs: AcceptanceTest(inputs.log_p, residual=len), "takes the weight w"),
    "a test by a function": (lambda inputs: AcceptanceTest(inputs.log_p, lambda at: at.p), "takes the weight w"),  # type: ignore
    "no bias": (lambda inputs: OutputDistribution.biased(inputs, None), "biased needs a logit_bias"),
    "nothing": (lambda inputs: None, r"rule 'own': output\(\) returns None, not an OutputDistribution"),
    "a cutoff of text": (lambda inputs: OutputDistribution.passing(inputs, "x"), "cutoff is 'x': give a number"),
    "no number as cutoff": (lambda inputs: OutputDistribution.trusting(inputs, math.nan), "cutoff is nan: give a num"),
    "a number as bias": (lambda inputs: OutputDistribution.biased(inputs, 1.0), r"logit_bias is 1.0: give \(\d"),
    "a bias per row": (lambda inputs: OutputDistribution.biased(inputs, inputs.log_p[:, :1]), r"is \(\d+, 1\) torch"),
    "no condition": (lambda inputs: OutputDistribution.target(inputs).where(None), "takes None: give .* bool"),
    "numbers as condition": (
        lambda inputs: OutputDistribution.target(inputs).where(inputs.log_p), "float.*: give .* bool"
    ),
    "no function of contexts": (lambda inputs: OutputDistribution.dense(inputs, inputs.log_p), "a function of con"),
    "a function without a value": (
        lambda inputs: OutputDistribution.dense(inputs, lambda at: None), r"log_r\(contexts\) returns None: return ln r"
    ),
    "whole numbers as ln r": (
        lambda inputs: OutputDistribution.dense(inputs, lambda at: at.log_p.long()), r"returns .*int64: return ln r"
    ),
    "NaN within a cutoff": (
        lambda inputs: OutputDistribution.passing(inputs, inputs.log_p * math.nan), "rule's cutoff is NaN in row 0"
    ),
    "NaN within a trusted cutoff": (
        lambda inputs: OutputDistribution.trusting(inputs, inputs.log_p.clone().fill_(math.nan)), "rule's cutoff is NaN"
    ),
    "NaN within a bias": (
        lambda inputs: OutputDistribution.biased(inputs, inputs.log_p * math.nan), "rule's logit_bias is NaN in row 0"
    ),
    "NaN within ln r": (
        lambda inputs: OutputDistribution.dense(inputs, lambda at: at.log_p.index_fill(1, torch.tensor(3), math.nan)),
        "rule's log_r is NaN",
    ),
    "more than all": (
        lambda inputs: replace(
            OutputDistribution.target(inputs), test=AcceptanceTest(torch.full_like(inputs.log_p, 0.9))
        ), "temperature 0|more than 1 over a context's children",
    ),
    "NaN as chances": (
        lambda inputs: replace(OutputDistribution.target(inputs), test=AcceptanceTest(inputs.log_p * math.nan)),
        "temperature 0|rule's accept_prob is negative, NaN",
    ),
    "chances of rows": (
        lambda inputs: replace(OutputDistribution.target(inputs), test=AcceptanceTest(inputs.log_p[:, 0])),
        r"temperature 0|rule 'own': test.accept_prob is \(\d+,\) torch",
    ),
    "a condition per row": (
        lambda inputs: OutputDistribution.target(inputs).where(lambda at: at.has_q[:1]), r"where\(\) takes \(1,\) "
    ),
    "a condition by nodes and rows": (
        lambda inputs: OutputDistribution.target(inputs).where(lambda at: inputs.has_q.T), "takes .*bool: give"
    ),
    "a function without a condition": (
        lambda inputs: OutputDistribution.target(inputs).where(lambda at: None), "takes None: give"  # type: ignore
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED)
@pytest.mark.parametrize("greedy", [True, False])
def test_what_is_no_distribution_is_refused(form: str, greedy: bool) -> None:
    written, words = REFUSED[form]

    class Own(LossyRule):
        name = "own"

        def output(self, inputs: RuleInputs) -> OutputDistribution:
            return written(inputs)

    with pytest.raises(FsdError, match=words):
        Own()(tree_round(0, greedy=greedy))


CONDITIONS: dict[str, Callable[[VocabRows], Tensor | bool]] = {
    "rows of q": lambda at: at.has_q & (at.q_logits.softmax(-1).amax(-1) > 0.3),
    "true": lambda at: True,
    "false": lambda at: at.inputs.tree.q_logits.shape[1] == 0,
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_is_asked_where_something_was_drafted(condition: str) -> None:
    """A root alone has no q to read."""
    holds: Any = CONDITIONS[condition]
    inputs = RuleInputs(tree_round(0))
    output = OutputDistribution.passing(inputs, -math.inf)
    at = VocabRows.every(inputs)
    wanted = output.applies & torch.as_tensor(holds(at)).expand(len(at.rows)).view_as(output.applies)
    assert torch.equal(output.where(holds).applies, wanted)
    logits = inputs.round.logits[:, :1]
    root = DraftTree.root_only(inputs.tree.tokens[:, 0], logits.shape[-1])
    alone = RuleInputs(RoundInput(root, logits, logits, True, None))
    assert not OutputDistribution.passing(alone, -math.inf).where(holds).applies.any()


@pytest.mark.parametrize("greedy", [True, False])
def test_functions_of_rules_may_read_q_where_lookups_gave_none(greedy: bool) -> None:
    """Their answers count nowhere, and what needs no q goes on."""
    round = tree_round(0, greedy=greedy)
    width = round.logits.shape[-1]
    tree = replace(round.tree, q_logits=torch.empty(len(round.tree.tokens), 0, width))
    inputs = RuleInputs(replace(round, tree=replace(tree, q_index=torch.full_like(tree.q_index, -1))))
    at = VocabRows.every(inputs)
    assert at.q_logits.shape == (len(at.rows), width) and inputs.log_q.isneginf().all()
    output = OutputDistribution.passing(inputs, -math.inf)
    close = output.where(lambda at: at.has_q & (at.q_logits.softmax(-1).amax(-1) > 0.3))
    assert output.applies.any() and not close.applies.any()
    either = output.where(lambda at: (at.q_logits.argmax(-1) > 3) & at.has_q | (at.log_p.amax(-1) < 0))
    assert torch.equal(either.applies, output.applies)
