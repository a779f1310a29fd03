"""What checkpoints do with files, row by row of the table of features: the tests that show each row to work."""

from __future__ import annotations

import pytest
from test_faults_of_others import names

ROWS: dict[str, tuple[str, ...]] = {
    "F1 names": (
        "test_a_pattern_names_the_counts",
        "test_a_pattern_that_would_make_trouble_is_refused",
        "test_ranks_in_a_path_are_those_of_the_process",
    ),
    "F2 latest": (
        "test_the_latest_is_the_numerically_newest_valid_one",
        "test_the_newest_by_number_with_any_pattern",
        "test_where_there_is_none_it_says_where_it_looked",
        "test_copies_that_a_user_made_are_no_checkpoints_of_a_folder",
    ),
    "F3 what to load": (
        "test_weights_of_another_program_are_fine_tuned_with_a_new_head",
        "test_chosen_states_are_loaded_and_no_other",
        "test_a_name_is_mapped_by_the_first_glob_that_matches",
        "test_a_glob_that_matches_nothing_is_a_warning",
        "test_the_prefixes_of_wrappers_are_understood_in_every_part",
    ),
    "F4 random states": (
        "test_random_generators_go_on_where_they_were",
        "test_random_states_of_missing_gpus_are_reported",
    ),
    "F5 archives": (
        "test_an_archive_comes_back_as_the_checkpoint_whatever_it_is_called",
        "test_a_hostile_archive_is_refused_and_writes_nothing",
        "test_an_archive_is_read_by_tar_and_safetensors",
        "test_a_resume_from_an_archive_a_rank_is_bit_identical",
        "test_a_rank_reads_each_archive_that_it_needs_once_and_no_other",
    ),
    "F6 places": (
        "test_a_run_whose_disk_is_lost_goes_on_from_the_store_bit_for_bit",
        "test_under_seeded_faults_nothing_committed_is_lost_and_nothing_partial_is_accepted",
        "test_while_the_store_is_away_saves_go_on_and_are_sent_later",
        "test_another_machine_loads_what_was_sent_once",
    ),
    "F7 other programs": (
        "test_weights_in_a_torch_file_are_found",
        "test_a_dcp_folder_is_read_in_one_process",
        "test_safetensors_files_and_folders_are_read",
        "test_a_file_that_runs_code_needs_a_flag_on_the_command_line",
        "test_a_hostile_checkpoint_is_refused_in_one_line",
    ),
    "F8 checkpointers": (
        "test_stager_writer_and_reader_can_be_given",
        "test_a_save_is_none_or_the_pair_of_its_futures",
        "test_commit_hooks_are_called_before_and_after_the_commit",
        "test_loading_into_a_state_fills_the_named_keys_alone_and_in_place",
    ),
    "F9 export": (
        "test_transformers_and_dcp_load_an_export",
        "test_an_average_is_a_checkpoint_that_is_evaluated_and_forked",
        "test_stripped_weights_are_evaluated_and_cannot_be_resumed",
    ),
    "F10 verify": ("test_a_changed_byte_anywhere_is_noticed", "test_altered_and_missing_objects_are_noticed"),
    "F12 without a Trainer": (
        "test_a_loaded_training_goes_on_bit_for_bit",
        "test_fine_tuning_loads_the_model_alone_from_epoch_0",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_shown_to_work(row: str) -> None:
    assert set(ROWS[row]) <= names()
