"""Rules that are lossy in one phase of the text: exact elsewhere, in the engine, at the command line, in the server.

Laws of whole sequences with phases: tests/test_rules_laws.py; inside vLLM: tests/test_vllm_rules.py.
"""

from __future__ import annotations

import pytest
import torch

from fsd_infer import FsdError, LMDrafter, Target, TreeShape
from fsd_infer.engine import Request, decode
from fsd_infer.rules import Source, parse_rule
from fsd_infer.rules.phases import markers, markers_of
from tests.families import tiny_model


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


@pytest.mark.parametrize("rule", ["draft-only", "fuzzy:js:inf", "typical:0:0", "tilted:0.2:novel=0:floor=0"])
def test_outside_the_phase_each_token_is_the_targets_own(rule: str) -> None:
    """At temperature 0 by the target's argmax after the very text that was emitted; phases begin and end in it."""
    model, prompt = tiny_model("llama"), [5, 9, 11]
    target = Target(model)
    drafter = LMDrafter(Target(tiny_model("llama", seed=1)), target, TreeShape(4, 2, 8))
    opening = decode(target, drafter, parse_rule("exact"), Request([prompt], 4)).sequences[0][2]
    phased = parse_rule(f"{rule}:only_in=think")
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
            assert not record.gates[place] and record.spent[place] == 0 and record.sources[place] != Source.GATE
    assert any(gate for gate, lossy in zip(record.gates, states) if lossy)


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
