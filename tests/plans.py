"""Plans that tests force on the library: small sizes of work, so that small inputs meet all of its seams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from cce_dist.planner import Plan, Problem, make_plan

# of each method: small panels and chunks, so that small problems have several. of ``cached`` a slab of columns in the
# memory of the classifier's gradient, where that has room for it, and as many others
SEAMS = {
    "recompute": {"panel": 256, "wide": 0, "rows": 16},
    "cached": {"kept": 512, "lent": 256, "slab": 256, "part": 16, "panel": 256, "wide": 0, "rows": 16},
    "fused": {"chunk": 16},
}


@contextmanager
def forced_plan(**fields: int) -> Iterator[list[Plan]]:
    """Whatever the planner chooses, with ``fields`` in their place. Yields the plans that calls got."""
    plans: list[Plan] = []

    def make(problem: Problem, budget: int | None, smallest: bool, method: str | None) -> Plan:
        plans.append(replace(make_plan(problem, budget, smallest, method), **fields))
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cce_dist.functional.make_plan", make)
        yield plans
