"""Mutants of replays and of the comparison of steps: each lets something that differs pass as equal, or keeps too much.

`python scripts/mutants.py replay` runs them, and prints which test noticed each.
"""

from __future__ import annotations

_PLAN, _SAVER = "trainer_cli/addons/exact/replay_plan.py", "trainer_cli/addons/exact/replay_saver.py"
_RECORDS, _REPLAY = "trainer_cli/addons/exact/replay_records.py", "trainer_cli/addons/exact/replay.py"
_ROWS, _TRACE = "trainer_cli/addons/exact/divergence.py", "trainer_cli/addons/exact/trace.py"

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
        _PLAN, "if is_finished or _trains_otherwise(history, earlier, later):", "if is_finished:", _BOUNDARIES,
    ),
    "a replay passes the end of a finished run": (
        _PLAN, "if is_finished or _trains_otherwise(history, earlier, later):", "if not is_finished:", _BOUNDARIES,
    ),
    "an attempt is its own boundary": (
        _PLAN, "if earlier == later:", "if False:",
        (f"{_OF_REPLAY}::test_steps_before_the_first_known_attempt_are_made",),
    ),
    "any config may keep a state": (
        _REPLAY, "[*_find_changes(plan, composed), *environment] if keep else []", "[]", _DOUBTS,
    ),
    "a state is kept though a record differs": (
        _SAVER, "if any(self.states.values()) or any(self._comparison.differences(step, ended=False)):", "if False:",
        (f"{_OF_REPLAY}::test_the_first_record_that_differs_is_named_and_nothing_is_kept",),
    ),
    "records of the checkpoint to begin with count": (_RECORDS, "if step > self._after and", "if", _OF_RECORDS),
    "the clock counts": (_RECORDS, "not is_clocked(key) and", "", _OF_RECORDS),
    "a missing value of a record is equal": (
        _RECORDS, "if recorded[key] != replayed.get(key):", "if key in replayed and recorded[key] != replayed[key]:",
        _OF_RECORDS,
    ),
    "only the first of several ranks counts": (
        _ROWS, "    if row.ranks == other.ranks:\n        return values\n", "", _OF_ROWS,
    ),
    "the order of samples in a step does not count": (
        _ROWS, "_compare_leaves if is_same_division else _compare_sets", "_compare_sets", _OF_ROWS,
    ),
    "hidden state alone is a verdict": (
        _TRACE, "(difference for difference in candidates if difference.kind is not TraceKind.hidden)", "candidates",
        _OF_TRACE,
    ),
    "what was ignored differs": (_TRACE, " and name not in ignored", "", _OF_TRACE),
}  # fmt: skip
