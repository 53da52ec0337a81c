"""Which cases of a parametrised test are fast: a part that covers the product. `make test-slow` runs the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def covering(*axes: Sequence[Any], pairs: Iterable[tuple[int, int]] = ()) -> list[Any]:
    """All combinations of the axes' values, for ``pytest.mark.parametrize``.

    Fast are as few as a greedy choice finds that have every value of every axis and, of two axes whose numbers are in
    ``pairs`` because they interact, every pair of values. The others are marked slow.
    """
    every = list(product(*(range(len(axis)) for axis in axes)))
    groups = [*((number,) for number in range(len(axes))), *pairs]
    has = {case: {(group, *(case[number] for number in group)) for group in groups} for case in every}
    missing, used, fast = set().union(*has.values()), Counter[Any](), set()
    while missing:
        best = max(every, key=lambda case: (len(has[case] & missing), -sum(used[part] for part in has[case])))
        fast.add(best)
        missing -= has[best]
        used.update(has[best])
    cases = [tuple(axis[place] for axis, place in zip(axes, case)) for case in every]
    return fast_only(cases, [case for case, places in zip(cases, every) if places in fast])


def fast_only(cases: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """The cases, for ``pytest.mark.parametrize``, those outside of ``fast`` marked slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in fast else pytest.mark.slow)
        for case in cases
    ]
