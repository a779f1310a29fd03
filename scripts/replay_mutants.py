"""Mutants of replays and of the comparison of steps: each lets something that differs pass as equal, or keeps too much.

`python scripts/mutants.py replay` runs them, and prints which test noticed each.
"""

from __future__ import annotations

_OF_REPLAY = "tests/runs/test_replay.py"
_BOUNDARIES = (f"{_OF_REPLAY}::test_steps_of_attempts_with_several_configs_are_refused",)
_DOUBTS = (
    f"{_OF_REPLAY}::test_with_another_config_or_source_a_state_is_kept_once_the_next_record_shows_it_to_be_equal",
    f"{_OF_REPLAY}::test_a_kept_checkpoint_shows_it_where_no_record_does",
    f"{_OF_REPLAY}::test_a_state_before_a_record_that_differs_is_not_kept",
)
_OF_RECORDS = ("tests/runs/test_replay_records.py",)
_OF_ROWS = (
    "tests/testing/test_diverge.py::test_the_first_difference_of_two_lists_is_found",
    "tests/testing/test_diverge.py::test_what_a_rank_computes_for_itself_has_its_name",
)
_OF_TRACE = ("tests/testing/test_trace.py",)

OF_REPLAY: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "a replay passes an attempt with another config": (
        "find_boundary",
        "is_finished or has_other_source or _trains_otherwise(history, earlier, later)",
        "is_finished or has_other_source",
        _BOUNDARIES,
    ),
    "a replay passes the end of a finished run": (
        "find_boundary",
        "is_finished or has_other_source or _trains_otherwise(history, earlier, later)",
        "not is_finished",
        _BOUNDARIES,
    ),
    "an attempt is its own boundary": (
        "find_boundary",
        "earlier == later",
        "False",
        (f"{_OF_REPLAY}::test_steps_before_the_first_known_attempt_are_made",),
    ),
    "any config may keep a state": (
        "trainer_cli.addons.exact.replay:replay",
        "[*_find_changes(plan, composed), *environment, *plan.doubts] if keep else []",
        "[]",
        _DOUBTS,
    ),
    "a state is kept though a record differs": (
        "ReplaySaver._may_keep",
        "any(self.states.values()) or any(self._comparison.differences(step, ended=False))",
        "False",
        (f"{_OF_REPLAY}::test_the_first_record_that_differs_is_named_and_nothing_is_kept",),
    ),
    "records of the checkpoint to begin with count": (
        "RecordComparison.steps",
        "step > self._after and (last is None or step <= last) and set(self._keys(record)) - _COUNTS",
        "(last is None or step <= last) and set(self._keys(record)) - _COUNTS",
        _OF_RECORDS,
    ),
    "the clock counts": (
        "RecordComparison._keys",
        "not is_clocked(key) and (not any((matches(key, glob) for glob in self._without)))",
        "not any((matches(key, glob) for glob in self._without))",
        _OF_RECORDS,
    ),
    "a missing value of a record is equal": (
        "RecordComparison.differences",
        "recorded[key] != replayed.get(key)",
        "key in replayed and recorded[key] != replayed[key]",
        _OF_RECORDS,
    ),
    "only the first of several ranks counts": (
        "_select_comparable",
        "if row.ranks == other.ranks:\n    return values",
        "",
        _OF_ROWS,
    ),
    "the order of samples in a step does not count": (
        "find_first_divergence",
        "_compare_leaves if is_same_division else _compare_sets",
        "_compare_sets",
        _OF_ROWS,
    ),
    "hidden state alone is a verdict": (
        "first_difference",
        "(difference for difference in candidates if difference.kind is not TraceKind.hidden)",
        "candidates",
        _OF_TRACE,
    ),
    "what was ignored differs": (
        "differing_values",
        "value.straight != value.other and name not in ignored",
        "value.straight != value.other",
        _OF_TRACE,
    ),
}
