"""Faults of the checkpointers of PyTorch, one by one: a test shows that ours has it not, or it cannot arise."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from trainer_cli import make_async_checkpointer, make_sync_checkpointer

TESTS = Path(__file__).parents[1]
ROWS = [*(f"X{number}" for number in range(1, 11)), *(f"D{number}" for number in range(1, 23))]
"""X: torch.distributed.checkpoint._experimental; D: the stable part."""
SHOWN_BY = {
    "X1": ("a partial load ignores strides", "test_tensors_that_are_not_contiguous_come_back_with_their_values"),
    "X2": ("a failed write fails all later ones", "test_a_failed_save_leaves_nothing_and_the_next_one_works"),
    "X3": ("settings are ignored", "test_x3_settings_are_used"),
    "X4": ("the default fails without a GPU", "test_a_save_is_none_or_the_pair_of_its_futures"),
    "X5": ("many tensors need as many open files", "test_x5_more_tensors_than_open_files"),
    "X7": ("an empty tensor breaks a partial load", "test_empty_and_scalar_tensors_are_filled"),
    "X8": ("numpy's random state cannot be loaded", "test_random_generators_go_on_where_they_were"),
    "X9": ("a torn save looks like a whole one", "test_a_kill_at_any_operation_loses_nothing"),
    "D1": ("an error in a writing thread is lost", "test_any_error_while_a_checkpoint_is_written_is_a_failed_save"),
    "D2": ("a save over an old one mixes both", "test_a_folder_with_a_manifest_is_never_replaced"),
    "D3": (
        "folders are not fsynced",
        "test_everything_is_at_rest_before_the_folder_gets_its_name_and_that_too",
    ),
    "D5": (
        "what does not fit is ignored or cast in silence",
        "test_everything_that_does_not_fit_is_reported_in_one_table_and_nothing_is_loaded",
    ),
    "D6": ("moments of a fresh optimizer are lost", "test_a_restored_run_goes_on_bit_for_bit"),
    "D7": ("gradients make the state empty", "test_d7_gradients_do_not_change_the_state"),
    "D8": (
        "a parameter without gradient cannot be resumed",
        "test_a_fresh_optimizer_and_parameters_without_a_gradient_have_no_state",
    ),
    "D9": ("tied weights are written twice", "test_tied_tensors_are_stored_once_and_are_tied_again"),
    "D10": ("each tensor is a file of its own", "test_d10_small_tensors_take_little_space"),
    "D11": ("what is no tensor breaks the file", "test_transformers_reads_a_checkpoint"),
    "D12": ("each save allocates a copy", "test_one_buffer_serves_every_save_and_grows_with_the_state"),
    "D13": ("memory is kept after a save", "test_what_a_job_held_is_freed_when_it_is_done"),
    "D19": ("pickles run code", "test_only_restricted_readers_import_pickle"),
    "D20": ("there is no retention and no discovery", "test_three_are_left_where_three_are_to_be_kept"),
    "D21": ("old ones go too early", "test_what_follows_a_commit_is_done_after_it_and_only_then"),
    "D22": ("discovery by a part of the name", "test_copies_that_a_user_made_are_no_checkpoints_of_a_folder"),
}
"""Row -> the fault, and the test that shows its absence."""
CANNOT_ARISE = {
    "X6": "There is no barrier with a time limit: one process commits.",
    "X10": "Saves are written by a thread, so no process starts and imports the script again.",
    "D4": "Each save has a folder of its own, so no file of another save is in it.",
    "D14": "Writing, reading and digesting release the interpreter's lock; scripts/bench measures the stall.",
    "D15": "No process group is needed, and no process started.",
    "D16": "There is no child process that could be dead.",
    "D17": "There is no child process to start; memory is prepared by the writer thread.",
    "D18": "The writer thread talks to no other rank.",
}
"""Row -> why it cannot be here."""


@cache
def names() -> set[str]:
    """Every test of the project."""
    return {
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", ROWS)
def test_each_fault_is_shown_not_to_be_here(row: str) -> None:
    assert (row in SHOWN_BY) != (row in CANNOT_ARISE)
    assert row in CANNOT_ARISE or SHOWN_BY[row][1] in names()


@pytest.mark.parametrize("make", [make_sync_checkpointer, make_async_checkpointer])
def test_x3_settings_are_used(tmp_path: Path, make: type) -> None:
    checkpointer = make(digest="sha256", format="torch_file")
    checkpointer.save({"x": torch.ones(2)}, tmp_path / "step1")
    checkpointer.close()
    manifest = make_sync_checkpointer().manifest(tmp_path / "step1")
    assert manifest.format == "torch_file"
    assert {entry.algorithm for entry in manifest.files.values()} == {"sha256"}


MANY = """
import resource, sys
import torch
from trainer_cli import make_async_checkpointer
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
state = {f"t{number}": torch.full((3,), float(number)) for number in range(500)}
checkpointer = make_async_checkpointer()
for step in (1, 2):
    checkpointer.save(state, f"{sys.argv[1]}/step{step}")
checkpointer.close()
loaded = checkpointer.load(f"{sys.argv[1]}/step2")
assert all(torch.equal(loaded[name], value) for name, value in state.items())
"""


@pytest.mark.slow
def test_x5_more_tensors_than_open_files(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MANY, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_d7_gradients_do_not_change_the_state() -> None:
    from trainer_cli.checkpoint.optimizer_state import capture_optimizer

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = capture_optimizer(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    after = capture_optimizer(model, optimizer)
    assert before["state"].keys() == after["state"].keys() == {"weight", "bias"}
    assert torch.equal(before["state"]["weight"]["exp_avg"], after["state"]["weight"]["exp_avg"])
    assert model.weight.grad is not None


def test_d10_small_tensors_take_little_space(tmp_path: Path) -> None:
    state = {f"scalar{number}": torch.tensor(float(number)) for number in range(3000)}
    make_sync_checkpointer().save(state, tmp_path / "step1")
    assert sum(path.stat().st_size for path in (tmp_path / "step1").iterdir()) < 1_000_000
