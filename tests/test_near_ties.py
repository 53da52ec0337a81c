"""Near ties: the logits of a text read in forwards of several tokens, and what is counted of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.near_ties import compare, read_answer, summary
from benchmarks.results_page import ties
from fsd_infer.targets.target import Target
from tests.families import tiny_model


def test_an_answer_is_read_as_it_was_decoded() -> None:
    """In fp32 the logits of any number of rows are those of one forward over the whole text."""
    model = tiny_model("llama")
    target = Target(model)
    prompt, answer = [3, 9, 4, 1, 7], [5, 2, 8, 8, 6, 1, 3, 2]
    with torch.no_grad():
        whole = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    for rows in (1, 3, 7, 20):
        torch.testing.assert_close(read_answer(target, prompt, answer, rows), whole, atol=1e-4, rtol=1e-4)


def test_differences_are_counted_by_the_lead_of_the_best_token() -> None:
    true = torch.tensor([[2.0, 1.97, 0.0], [0.0, 1.0, 0.8], [3.0, 0.0, 0.0], [1.0, 1.3, 0.0]])
    plain, verified = true.clone(), true.clone()
    plain[0, :2] = 2.0  # a tie goes to the first
    verified[0, 1], verified[1, 2] = 2.5, 1.5
    found = summary([compare(plain[:2], verified[:2], true[:2]), compare(plain[2:], verified[2:], true[2:])])
    assert found["positions"] == 4 and found["tied_in_bf16"] == 0.25
    pair = found["pairs"]["verified, plain"]
    assert pair["differ"]["mean"] == 0.5 and pair["answers_with_one"] == 1
    assert pair["leads"] == pytest.approx([0.03, 0.2], abs=1e-4)
    assert pair["by_lead"] == [[0.0, 1, 1], [0.05, 0, 0], [0.1, 1, 1], [0.25, 1, 0], [0.5, 0, 0], [1.0, 1, 0]]
    assert found["pairs"]["plain, fp32"]["leads"] == []
    assert "differ, of 4 tokens | answers with one, of 2 |" in ties({**found, "prompts": 2})
