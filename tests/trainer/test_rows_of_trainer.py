"""What the trainer does, row by row of the table of features: the tests that show each row to work."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROWS: dict[str, tuple[str, ...]] = {
    "T1 Trainer": (
        "test_every_slot_says_what_it_expected_and_what_it_got",
        "test_an_optimizer_instance_cannot_go_with_a_model_that_is_still_to_be_made",
        "test_without_an_optimizer_there_is_only_validation",
        "test_messages_go_where_logging_says_while_a_trainer_works",
        "test_every_public_name_is_there",
    ),
    "T2 hooks": (
        "test_a_fit_calls_every_hook_where_the_pseudo_code_says",
        "test_a_save_and_a_load_call_their_hooks_in_order",
        "test_contexts_are_entered_and_left_around_what_they_are_for",
        "test_on_before_forward_may_change_what_the_model_is_called_with",
        "test_an_exception_in_any_hook_keeps_its_type_ends_all_else_and_leaves_the_last_checkpoint_valid",
    ),
    "T3 global callbacks": (
        "test_a_callback_is_global_inside_its_block_for_trainers_old_and_new",
        "test_a_handle_removes_a_global_callback_once",
        "test_two_callbacks_of_one_class_have_their_own_state",
    ),
    "T4 fit": (
        "test_a_stop_that_finishes_the_run_still_has_its_evaluation_and_its_log",
        "test_an_end_by_a_callback_evaluates_what_was_not_due",
    ),
    "T5 training loop": (
        "test_accumulated_gradients_are_those_of_the_whole_batch",
        "test_logs_and_evaluations_come_at_absolute_counts_and_at_the_end",
        "test_each_loader_has_its_interval_and_its_loop",
        "test_a_fixed_size_has_the_gradient_of_the_whole_batch_with_accumulation_too",
    ),
    "T6 validation loop": (
        "test_a_validation_mean_is_that_over_all_samples_whatever_the_batches",
        "test_an_evaluation_leaves_modes_gradients_and_random_state_alone",
        "test_a_validation_loop_has_its_own_hook_names",
        "test_a_list_of_loaders_is_named_by_number_and_a_loop_may_be_given",
    ),
    "T7 validate and validate_all": (
        "test_every_checkpoint_is_evaluated_on_every_loader_with_its_own_weights_and_step",
        "test_checkpoints_are_evaluated_by_a_glob_in_the_order_of_steps",
    ),
    "T8 ValidationCallback": (
        "test_it_is_called_every_nth_time_and_the_last",
        "test_the_count_survives_a_resume_and_an_early_end_has_its_last_call",
        "test_a_language_model_continues_prompts_by_the_tokens_of_its_data",
        "test_metrics_of_torchmetrics_are_computed_over_all_samples_and_not_averaged_over_batches",
        "test_a_task_from_a_file_is_evaluated",
    ),
    "T11 precision": (
        "test_gradients_are_those_of_no_scale_before_they_are_averaged_and_clipped",
        "test_a_dynamic_loss_scale_stays_in_its_bounds",
        "test_a_scale_begins_and_doubles_as_the_config_says_and_goes_on_so",
        "test_bounds_without_a_dynamic_scale_are_refused",
    ),
    "T12 schedulers": (
        "test_every_scheduler_of_torch_goes_on_bit_for_bit",
        "test_a_schedule_of_torch_that_ships_goes_on_bit_for_bit",
        "test_a_plateau_is_told_the_metric_of_each_evaluation_and_goes_on_bit_for_bit",
        "test_what_does_not_fit_by_name_or_kind_is_in_the_table",
        "test_schedules_of_tagged_groups_change_these_alone_and_resume_exactly",
        "test_a_schedule_rises_over_its_warm_up_and_then_follows_its_curve",
    ),
    "T13 parameter groups": (
        "test_groups_by_a_regular_expression_have_their_settings",
        "test_frozen_parameters_and_statistics_stay_and_the_optimizer_has_none_of_them",
    ),
    "T14 reproducibility": (
        "test_deterministic_covers_cublas_cudnn_and_the_compiler",
        "test_a_deterministic_run_allows_deterministic_kernels_only",
        "test_a_seed_gives_the_numbers_that_each_library_gives_for_it",
        "test_two_runs_with_other_seeds_do_not_end_alike",
    ),
    "T15 logging": (
        "test_metrics_of_every_step_are_kept_and_no_step_waits_for_the_device_before_a_log_step",
        "test_names_begin_with_the_scope_they_are_logged_in",
        "test_a_step_knows_whether_it_is_logged_and_whether_it_is_first_or_last",
        "test_a_plain_line_shows_step_metrics_rate_and_remaining_time",
    ),
    "T16 timetable": (
        "test_a_fit_reports_its_timetable_before_the_first_step",
        "test_a_run_does_what_its_plan_tells",
    ),
    "T19 restart": (
        "test_a_run_goes_on_after_a_kill_and_an_error_as_if_nothing_had_been",
        "test_what_a_restart_cannot_mend_ends_it",
    ),
    "T21 loggers": (
        "test_the_bar_shows_step_rate_and_time_left_and_what_takes_long",
        "test_a_resume_drops_later_steps_and_a_torn_record_from_the_files",
        "test_rewinding_drops_what_is_later_than_the_step",
        "test_a_resume_drops_later_rows_and_a_torn_one_and_writes_no_second_header",
        "test_wandb_continues_one_run_in_its_offline_files",
        "test_mlflow_continues_one_run_in_its_files",
        "test_trackio_continues_one_run_in_its_folder",
        "test_a_logger_takes_texts_images_and_histograms_or_leaves_them_out",
    ),
    "T22 custom step": (
        "test_training_and_evaluation_call_the_model_alike",
        "test_the_gan_learns_to_draw_digits",
        "test_a_gan_that_is_killed_goes_on_bit_for_bit",
        "test_an_optimizer_may_step_in_the_backward_and_resumes_exactly",
        "test_the_check_passes_on_what_the_documentation_shows",
    ),
}


@cache
def _tests() -> set[str]:
    """The names of all test functions."""
    return {
        node.name
        for path in Path(__file__).parents[1].rglob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_shown_to_work(row: str) -> None:
    assert set(ROWS[row]) <= _tests()
