"""The trials of other savers, with one that needs no other environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import peers_environment
from campaign import peers_trials
from campaign.peers.peer_savers import CONTENDERS
from campaign.peers.worker import Worker
from campaign.verdict import Verdict


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return Worker(CONTENDERS["torch.save, then rename"](), tmp_path_factory.mktemp("worker"))


@pytest.mark.parametrize(
    ("fault", "verdict", "detail"),
    [
        ("stop", Verdict.passed, ""),
        ("kills", Verdict.passed, ""),
        ("flips", Verdict.diverged, "the weights at the end are not those of the undisturbed run"),
        ("truncations", Verdict.hard_fail, "the start after the fault fails: RuntimeError"),
    ],
)
def test_a_saver_without_digests_is_judged_as_the_run_is(
    worker: Worker, fault: str, verdict: Verdict, detail: str
) -> None:
    outcome = worker.run(fault, 0)
    assert (outcome.verdict, detail in outcome.detail) == (verdict, True), outcome


def test_a_start_that_begins_anew_has_lost_what_was_announced(worker: Worker, tmp_path: Path) -> None:
    assert worker.go_on(tmp_path / "empty", [8]).verdict is Verdict.lost


def test_every_contender_meets_every_fault() -> None:
    assert [*CONTENDERS] == [*peers_trials.CONTENDERS]
    by_title: dict[str, list[Any]] = {fault.title: [] for fault in peers_trials.CLASSES}
    for fault in peers_trials.CLASSES:
        by_title[fault.title].append(fault.contender)
    assert all(names == [*CONTENDERS] for names in by_title.values())


@pytest.mark.slow
def test_a_worker_that_does_not_start_in_time_is_killed_and_its_cells_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_trials, "LIMIT_S", 0.0)
    monkeypatch.setattr(peers_environment, "install", lambda: sys.executable)
    monkeypatch.setattr(peers_trials, "versions", lambda: {"torch.save": "torch 2"})
    cells = [
        fault
        for fault in peers_trials.CLASSES
        if fault.contender == "torch.save" and fault.title in ("No fault", "Kill -9")
    ]
    peers_trials.start_workers.cache_clear()
    try:
        reasons = {fault.skipped() for fault in cells}
        assert peers_trials.start_workers.cache_info().misses == 1
    finally:
        peers_trials.start_workers.cache_clear()
    assert reasons == {"the worker was not ready within 0 s"}
