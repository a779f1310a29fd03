"""What a replay may cost at most, of the figures of the fits beside it."""

from __future__ import annotations

from replayed import most_for_replay


def test_a_replay_may_take_a_start_and_a_tenth_more_than_the_steps() -> None:
    start, fit = {"process": [2.0, 3.0]}, {"process": [12.0, 3.0]}
    assert most_for_replay(start, fit) == {"process": [13.0, 3.0]}
