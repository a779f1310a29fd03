"""At the start: ranks that do not see the run directory, or do not train the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ranks import HERE
from trainer_cli.errors import UserError
from trainer_cli.parallel import same
from trainer_cli.parallel.process_group import ProcessGroup
from trainer_cli.trainer.metrics import WeightedMeans

sys.path.insert(0, str(HERE.parent / "checkpoint"))
from thread_ranks import on_ranks


@pytest.mark.parametrize("theirs", [None, b"of an earlier start"])
def test_a_rank_that_does_not_see_what_rank_0_wrote_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: bytes | None
) -> None:
    monkeypatch.setattr(same, "APPEARS_IN_S", 0.0)
    files = [tmp_path / name / "summary.json" for name in ("shared", "shared", "own")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
    files[0].write_bytes(b"of this start")
    if theirs is not None:
        files[2].write_bytes(theirs)
    for error in on_ranks(3, lambda group: same.check_same_file(group, files[group.rank])):
        assert isinstance(error, UserError)
        assert str(error).startswith("rank 2 (")
        assert f"cannot see {files[0].parent}, the run directory of rank 0" in str(error)


def test_a_file_that_appears_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "file", tmp_path / "late"]
    files[0].write_text("x")
    files[1].write_text("old")
    monkeypatch.setattr(same.time, "sleep", lambda _: files[1].write_text("x"))
    assert on_ranks(2, lambda group: same.check_same_file(group, files[group.rank])) == [None, None]


def test_ranks_that_divide_layers_must_have_the_same_samples() -> None:
    samples = [torch.arange(6).reshape(2, 3), torch.tensor(True)], [torch.ones(2, 3).bfloat16().mT]

    def check(group: ProcessGroup, differs: int | None) -> None:
        group.tensor_size = 2
        same.check_same_samples(group, [*samples[group.data_rank], torch.tensor(group.rank == differs)])

    assert on_ranks(4, lambda group: check(group, None)) == [None] * 4
    for error in on_ranks(4, lambda group: check(group, 3)):
        assert isinstance(error, UserError)
        assert str(error).startswith("ranks 2 and 3 divide layers between them, and have different samples")


def test_ranks_that_divide_layers_must_have_the_same_loss() -> None:
    def means(group: ProcessGroup, loss: float) -> dict[str, float]:
        group.tensor_size = 2
        meter = WeightedMeans(torch.device("cpu"))
        meter.add(torch.tensor(loss + group.data_rank), {}, 8)
        return meter.means(group)

    assert on_ranks(4, lambda group: means(group, 2.0 + 1e-4 * group.rank))[2:] == [
        {"loss": pytest.approx(3.0002)},
        {"loss": pytest.approx(3.0003)},
    ]
    for error in on_ranks(4, lambda group: means(group, 2.0 + 0.1 * (group.rank == 3))):
        assert isinstance(error, UserError)
        assert str(error).startswith("ranks 2 and 3 divide layers between them, and have different losses")


def test_ranks_that_differ_are_told_what_and_where() -> None:
    found = on_ranks(3, lambda group: same.check_same(group, {"torch": "2.13", "step": 40 - 10 * (group.rank == 1)}))
    assert [str(one) for one in found] == ["the ranks do not have the same step: 40 on rank 0, 30 on rank 1."] * 3
    assert on_ranks(2, lambda group: same.check_same(group, {"step": 40})) == [None, None]
