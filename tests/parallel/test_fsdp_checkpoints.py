"""Checkpoints of two gloo ranks whose model FSDP2 shards; one start for all claims."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import HERE, on_ranks
from trainer_cli.checkpoint.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.checkpoint.storage.local import LocalStorage

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    ends = on_ranks(2, [HERE / "fsdp_claims.py", folder])
    assert [code for code, _ in ends] == [0, -signal.SIGKILL], ends
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("asked", "answer"), [("faults", []), ("bits", True), ("async is sync", True), ("goes on", True)]
)
def test_a_sharded_training_comes_back_bit_for_bit(answers: list[dict[str, Any]], asked: str, answer: Any) -> None:
    assert [one[asked] for one in answers] == [answer, answer]


def test_one_process_reads_what_the_ranks_gathered(folder: Path) -> None:
    gathered = torch.load(folder / "gathered.pt", weights_only=True)
    loaded = make_sync_checkpointer().read(folder / "async")
    compared = 0
    for name, value in gathered["model"].items():
        assert torch.equal(loaded["model"][name], value), name
        compared += 1
    for name, kept in gathered["optimizer"]["state"].items():
        for key, value in kept.items():
            assert torch.equal(loaded["optimizer"]["state"][name][key], value), (name, key)
            compared += 1
    assert compared > 20
    assert loaded["model"]["head.weight"] is loaded["model"]["embed.weight"]


def test_divided_layers_come_back_in_any_layout(folder: Path, answers: list[dict[str, Any]]) -> None:
    assert [one["layouts"] for one in answers] == [[], []]
    compared = 0
    for number in range(3):
        loaded = make_sync_checkpointer().read(folder / "layouts" / str(number))
        for wanted in (torch.load(folder / f"layout{one}.pt", weights_only=True) for one in {0, number}):
            for name, value in wanted["model"].items():
                assert torch.equal(loaded["model"][name], value), (number, name)
                for key, kept in wanted["optimizer"]["state"].get(name, {}).items():
                    assert torch.equal(loaded["optimizer"]["state"][name][key], kept), (number, name, key)
                    compared += 1
    assert compared == 5 * 3 * 20


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_without_a_group_given_the_ranks_of_torchs_own_save_together(
    folder: Path, answers: list[dict[str, Any]], kind: str
) -> None:
    names = ["number", "own", "rank", "same"]
    for rank in range(2):
        own = [float(rank)] * 2
        assert answers[rank]["default group"][kind] == [rank, own, [5.0] * 3, 1, names, rank, own]
    state = make_sync_checkpointer().load(folder / "default" / kind)
    assert [of_rank["rank"] for of_rank in state["ranks"]] == [0, 1]
    manifest = make_sync_checkpointer().verify(folder / "default" / kind)
    assert [name for of_file in manifest.shards.values() for name in of_file] == ["same"]


def test_a_rank_can_save_alone_beside_torchs_group(answers: list[dict[str, Any]]) -> None:
    assert [one["default group"]["alone"] for one in answers] == [0, 1]


def test_other_values_beside_shared_tensors_are_refused(answers: list[dict[str, Any]]) -> None:
    for one in answers:
        assert "the ranks have different values under 'all', which also holds tensors" in one["default group"]["mixed"]


def test_what_a_tensor_group_does_not_divide_is_written_once(folder: Path) -> None:
    manifest = make_sync_checkpointer().verify(folder / "layouts" / "0")
    assert (manifest.world_size, manifest.tensor_size) == (2, 2)
    parts = [
        str(of_file["model/tokens.weight"]) for of_file in manifest.shards.values() if "model/tokens.weight" in of_file
    ]
    assert parts == ["[0:300, 0:64] of [300, 64]"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_failed_write_on_rank_1_is_reported_on_both_and_leaves_no_manifest(
    folder: Path, answers: list[dict[str, Any]], kind: str
) -> None:
    said = [one["failed"][kind] for one in answers]
    assert all(one.startswith("SaveError: ") and "No space left on device" in one for one in said)
    assert said[0].startswith("SaveError: rank 1: ")
    assert list((folder / f"failed-{kind}").iterdir()) == []


def test_a_rank_needs_memory_for_its_shard_and_a_constant(answers: list[dict[str, Any]]) -> None:
    from fsdp_claims import LARGE, MEGABYTE

    for one in answers:
        print({key: f"{value / MEGABYTE:.0f} MB" for key, value in one["memory"].items()}, "of a shard of 32 MB")
        assert one["memory"]["save"] < LARGE // 2 + 24 * MEGABYTE
        assert one["memory"]["load"] < LARGE // 2 + 24 * MEGABYTE


def test_a_rank_that_is_killed_before_the_commit_leaves_the_older_checkpoints(
    folder: Path, answers: list[dict[str, Any]]
) -> None:
    assert answers[0]["death"] != "no error"
    storage = LocalStorage(folder, run_id="run", attempt=1)
    assert [entry.name for entry in Catalog(storage).entries() if entry.valid] == ["async", "step3", "large"]
    storage.sweep()
    assert not list(folder.glob(".*"))
