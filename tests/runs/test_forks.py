"""Which runs are forks of others, as their attempts record it, and their order in the table of runs."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_cli.addons.view.forks import Fork, beside_parents, forks_among


def summary(run_id: str, parent: Any = None, step: Any = 10, shift: Any = 10) -> dict[str, Any]:
    told = {} if parent is None else {"forked_from": {"run_id": parent, "step": step, "shift": shift}}
    return {"run_id": run_id, "attempts": [{"attempt": 1, **told}, {"attempt": 2}]}


@pytest.mark.parametrize(
    ("summaries", "forks", "order"),
    [
        ([], {}, []),
        ([summary("a"), summary("b")], {}, [0, 1]),
        ([summary("b", "a"), summary("c"), summary("a")], {0: Fork(2, 10, 10)}, [1, 2, 0]),
        (
            [summary("c", "b", shift=0), summary("a"), summary("x"), summary("b", "a", 5, 5)],
            {0: Fork(3, 10, 0), 3: Fork(1, 5, 5)},
            [1, 3, 0, 2],
        ),
        ([summary("a", "gone")], {}, [0]),
        ([summary("a", "a")], {}, [0]),
        ([summary("a", "b"), summary("b", "a")], {0: Fork(1, 10, 10), 1: Fork(0, 10, 10)}, [0, 1]),
        ([summary("a"), summary("b", "a", step="x"), summary("c", "a", shift=None)], {}, [0, 1, 2]),
        ([summary("a"), summary("b", ["a"])], {}, [0, 1]),
        ([{}, {"attempts": [{}]}], {}, [0, 1]),
    ],
    ids=["none", "others", "below", "of a fork", "gone", "itself", "a circle", "odd steps", "odd id", "empty"],
)  # fmt: skip
def test_a_fork_stands_below_its_parent(
    summaries: list[dict[str, Any]], forks: dict[int, Fork], order: list[int]
) -> None:
    assert forks_among(summaries) == forks
    assert beside_parents(summaries) == order
