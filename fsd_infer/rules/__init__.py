"""Acceptance rules: which drafted tokens are emitted, and which token follows them.

A rule is an object, ``Fuzzy("js", threshold=0.3)``, or text on command lines and in records::

    exact    fuzzy:js:0.3    fuzzy:top_k_js:20:0.3    fuzzy:js:0.3:budget=2:gate=processed
    fuzzy-strict:tv:0.2      random:0.25              draft-only    tilted      tilted:1.5:exact_ngram_size=3:budget=5
    exact:block=true         lenient:0.5              typical       relaxed:10:0.6      threshold:single=0.4
    cactus:0.1               cascade-token:0.3        ensemble:0.7  fly:6:0.3     typical:exact_ngram_size=4
    asd:budget=4             mars:0.5

To write a rule, subclass :class:`LossyRule` and return a :class:`OutputDistribution` of a round's :class:`RuleInputs`;
see docs/internals.md.
"""

from fsd_core.former import former_names
from fsd_infer.rules.base import RULES, Exact, LossyRule, Rule, apply_rules
from fsd_infer.rules.distributions import AcceptanceTest, OutputDistribution
from fsd_infer.rules.fuzzy import DraftOnly, Fuzzy, FuzzyStrict, RandomGate
from fsd_infer.rules.inputs import RuleInputs
from fsd_infer.rules.parameters import parameter
from fsd_infer.rules.parsing import RuleLike, parse_rule, parse_rules, rule_text
from fsd_infer.rules.published import (
    Asd,
    Cactus,
    CascadeToken,
    Ensemble,
    Fly,
    Lenient,
    Mars,
    Relaxed,
    Threshold,
    Typical,
)
from fsd_infer.rules.texts import TokenHistory
from fsd_infer.rules.tilted import Tilted
from fsd_infer.rules.verification import Emission, RoundInput, TokenOrigin, Verdict
from fsd_infer.rules.vocab_rows import VocabRows

__all__ = [
    "RULES",
    "Asd",
    "Cactus",
    "CascadeToken",
    "VocabRows",
    "DraftOnly",
    "Emission",
    "Ensemble",
    "RuleInputs",
    "Exact",
    "Fly",
    "Fuzzy",
    "FuzzyStrict",
    "OutputDistribution",
    "Lenient",
    "LossyRule",
    "Mars",
    "RandomGate",
    "Relaxed",
    "Rule",
    "RuleLike",
    "TokenOrigin",
    "AcceptanceTest",
    "TokenHistory",
    "Threshold",
    "Tilted",
    "Typical",
    "Verdict",
    "RoundInput",
    "apply_rules",
    "parameter",
    "parse_rule",
    "parse_rules",
    "rule_text",
]

__getattr__ = former_names(
    __name__, Law="OutputDistribution", Evidence="RuleInputs", Contexts="VocabRows", Texts="TokenHistory",
    Verification="RoundInput",
)  # fmt: skip
