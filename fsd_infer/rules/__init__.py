"""Acceptance rules: which drafted tokens are emitted, and what follows them.

A rule is an object, ``Fuzzy("js", threshold=0.3)``, or text for command lines and records::

    exact    fuzzy:js:0.3    fuzzy:top_k_js:20:0.3    fuzzy:js:0.3:budget=2:gate=processed
    fuzzy-strict:tv:0.2      random:0.25              draft-only    tilted      tilted:1.5:novel=3:budget=5
    exact:block=true         lenient:0.5              typical       relaxed:10:0.6      threshold:single=0.4
    cactus:0.1               cascade-token:0.3        ensemble:0.7  fly:6:0.3     typical:novel=4

To write one, derive from :class:`LossyRule` and return the :class:`Law` that follows from a round's :class:`Evidence`
(docs/extending.md).
"""

from fsd_infer.rules.base import RULES, LossyRule, Rule, apply_rules
from fsd_infer.rules.cactus import Cactus
from fsd_infer.rules.cascade import CascadeToken
from fsd_infer.rules.draft_only import DraftOnly
from fsd_infer.rules.ensemble import Ensemble
from fsd_infer.rules.evidence import Contexts, Evidence
from fsd_infer.rules.exact import Exact
from fsd_infer.rules.fly import Fly
from fsd_infer.rules.fuzzy import Fuzzy, FuzzyStrict
from fsd_infer.rules.laws import Law, Test
from fsd_infer.rules.lenient import Lenient
from fsd_infer.rules.parameters import parameter
from fsd_infer.rules.parsing import RuleLike, parse_rule, parse_rules
from fsd_infer.rules.random_gate import RandomGate
from fsd_infer.rules.relaxed import Relaxed
from fsd_infer.rules.texts import Texts
from fsd_infer.rules.threshold import Threshold
from fsd_infer.rules.tilted import Tilted
from fsd_infer.rules.typical import Typical
from fsd_infer.rules.verification import Emission, Source, Verdict, Verification

__all__ = [
    "RULES",
    "Cactus",
    "CascadeToken",
    "Contexts",
    "DraftOnly",
    "Emission",
    "Ensemble",
    "Evidence",
    "Exact",
    "Fly",
    "Fuzzy",
    "FuzzyStrict",
    "Law",
    "Lenient",
    "LossyRule",
    "RandomGate",
    "Relaxed",
    "Rule",
    "RuleLike",
    "Source",
    "Test",
    "Texts",
    "Threshold",
    "Tilted",
    "Typical",
    "Verdict",
    "Verification",
    "apply_rules",
    "parameter",
    "parse_rule",
    "parse_rules",
]
