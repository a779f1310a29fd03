"""What callbacks and checkpoints of the Trainer do, row by row of the table of features: the tests that show it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROWS: dict[str, tuple[str, ...]] = {
    "T9 load": (
        "test_a_damaged_newest_checkpoint_is_set_aside_and_the_next_older_one_taken",
        "test_a_checkpoint_path_of_none_begins_anew",
        "test_a_checkpoint_that_was_named_is_never_replaced_by_another",
        "test_chosen_states_are_loaded_and_no_other",
        "test_everything_that_does_not_fit_is_reported_in_one_table_and_nothing_is_loaded",
        "test_without_strict_other_names_are_reported_but_other_shapes_are_still_refused",
        "test_a_run_starts_from_the_states_that_were_saved",
    ),
    "T10 save": (
        "test_hooks_may_add_to_a_checkpoint_and_take_it_back",
        "test_only_the_final_checkpoint_says_that_the_run_is_finished",
        "test_weights_of_every_kth_checkpoint_and_of_the_last_stay",
        "test_the_disk_is_exact_at_every_step_at_the_end_and_over_three_resumes",
        "test_the_rules_hold_across_two_resumes",
    ),
    "T17 early exit": (
        "test_the_first_function_that_answers_ends_the_run",
        "test_a_registered_function_is_asked_until_its_handle_is_removed",
        "test_the_first_value_at_the_threshold_or_beyond_ends_the_run",
        "test_a_run_that_a_threshold_ended_stays_finished_until_the_rule_changes",
    ),
    "T18 sparsity": (
        "test_the_ratio_is_as_asked_for_and_logged",
        "test_a_static_mask_stays_and_replaced_weights_begin_at_zero_without_momentum",
        "test_rigl_grows_where_the_gradient_is_largest_and_set_anywhere",
        "test_filters_and_shares_by_name",
        "test_a_resume_is_exact",
        "test_masks_are_those_of_one_process",
        "test_a_resume_with_sharded_masks_is_exact",
    ),
    "T20 checks of losses": (
        "test_raise_ends_the_training_before_anything_is_logged_or_saved",
        "test_skip_leaves_out_the_step_and_nothing_else",
        "test_roll_back_passes_over_the_data_and_logs_each_step_once",
        "test_a_resume_after_a_roll_back_is_exact",
        "test_a_nan_on_one_rank_has_the_effect_that_it_has_in_one_process",
        "test_a_training_that_goes_back_is_exact",
        "test_samples_are_skipped_once_and_the_training_is_as_long",
    ),
    "T20 norms, rates, FLOPs, memory, durations": (
        "test_norms_are_those_of_all_parameters_and_of_each_layer",
        "test_rates_and_flops_follow_from_the_counts",
        "test_every_group_has_its_rate_and_the_parts_of_a_step_a_time",
        "test_everything_is_logged_on_log_steps_alone",
        "test_the_table_counts_shared_parameters_once",
    ),
    "T20 profiler, activations, listeners": (
        "test_the_trace_is_one_that_a_browser_opens",
        "test_activations_are_summed_up_and_dumped",
        "test_hooks_do_not_stay_after_an_error",
    ),
    "T20 SelectiveGrad, LoRA, EMA, SWA, flags": (
        "test_only_the_chosen_elements_move",
        "test_adapters_and_chosen_parameters_are_trained_and_nothing_else",
        "test_a_merged_export_is_the_model_without_adapters",
        "test_the_average_follows_the_weights",
        "test_the_average_is_that_of_torch",
        "test_flags_are_set_while_their_part_lasts_and_restored_after_an_error",
        "test_every_callback_is_exact_beside_all_others",
    ),
}


def _names() -> set[str]:
    """Every test of the project."""
    return {
        node.name
        for path in Path(__file__).parents[1].rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_each_row_is_shown_by_tests_that_exist() -> None:
    missing = {name for tests in ROWS.values() for name in tests} - _names()
    assert not missing


@pytest.mark.parametrize("row", ["T9", "T10", "T17", "T18", "T20"])
def test_no_row_is_left_out(row: str) -> None:
    assert [name for name in ROWS if name.split()[0] == row]
