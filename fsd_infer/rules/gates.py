"""Gates that a divergence opens, for rules that let drafts through where target and drafter are close."""

from __future__ import annotations

import math
import warnings
from functools import cache

import torch
from torch import Tensor

from fsd_infer.divergence import divergence
from fsd_infer.errors import FsdError
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.laws import AtContexts


def check_gate(rule: str, parameter: str, measure: str, threshold: float | None) -> None:
    """Raise FsdError for a finite threshold that the divergence cannot pass: percent, bits, or another divergence's."""
    most = divergence(measure).bounds[1]
    if threshold is not None and most * (1 + 1e-6) < threshold < math.inf:  # the bound may be rounded up
        raise FsdError(
            f"rule {rule!r}: {parameter} must be at most {most:.4g}, the largest {measure}, not {threshold:g}; "
            "write inf for a gate that is always open."
        )


def divergence_gate(evidence: Evidence, measure: str, threshold: float, processed: bool = False) -> Tensor | AtContexts:
    """D(p, q) <= T where q is known; T = 0 never opens a gate, inf always does (also where D is infinite).

    ``measure`` and ``processed`` are as in :meth:`Contexts.divergence`.
    """
    if threshold == 0:
        return torch.zeros_like(evidence.has_q)
    if threshold == math.inf:
        return evidence.has_q
    never = divergence(measure).infinite_on_reduced_vocabulary and evidence.tree.draft_ids is not None
    if never and (evidence.greedy or not processed):
        _warn_never_opens(measure)
    return lambda at: at.divergence(measure, processed) <= threshold


@cache
def _warn_never_opens(name: str) -> None:
    """Says once per divergence that the drafter's vocabulary keeps the gate shut."""
    warnings.warn(
        f"divergence {name!r} is infinite wherever the target has mass outside the drafter's reduced vocabulary, so "
        "this gate never opens. Use js, tv, kl_qp or a top-k form, or a drafter with the full vocabulary.",
        stacklevel=2,
    )
