"""What ranks agree on: sums and requests of each step, and, at the start, that they see and train the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import ThreadGroup, on_ranks

from trainer_cli.errors import UserError
from trainer_cli.outputs.metrics import WeightedMeans
from trainer_cli.parallel import same
from trainer_cli.parallel.agreement import Agreement
from trainer_cli.parallel.process_group import ProcessGroup
from trainer_cli.policy.stopping import Stop
from trainer_cli.trainer.requests import Requests


class Others(ProcessGroup):
    """A group in which the other ranks add given numbers: weight, samples, requests, written."""

    def __init__(self, *numbers: float, world_size: int = 2) -> None:
        self.world_size = world_size
        self.numbers = torch.tensor(numbers, dtype=torch.float64)

    def start_sum(self, tensor: torch.Tensor) -> Any:
        tensor += self.numbers
        return None


class Adding(ThreadGroup):
    """Counts how often objects are gathered, which takes longer than to add numbers."""

    def __init__(self, group: ThreadGroup) -> None:
        super().__init__(group.rank, group.world_size, group._shared)
        self.gathered = 0

    def gather(self, value: Any) -> list[Any]:
        self.gathered += 1
        return super().gather(value)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        # Not on top of each other: all ranks read the tensor of each.
        total = sum(super().gather(tensor.clone()))
        assert isinstance(total, torch.Tensor)
        return tensor.copy_(total)


@pytest.mark.parametrize(
    ("others", "reports", "interrupt", "written"),
    [
        ((0, 0, 0, 0), False, False, False),
        ((0, 0, 1, 0), False, True, False),
        ((0, 0, 0, 1), False, False, False),
        ((0, 0, 0, 0), True, False, False),
        ((0, 0, 0, 1), True, True, True),
    ],
)  # fmt: skip
def test_all_written_or_a_request_interrupts(
    others: tuple[float, ...], reports: bool, interrupt: bool, written: bool
) -> None:
    agreement = Agreement(Others(*others))
    if reports:
        agreement.report_written()
    agreement.start()
    agreement.finish()
    assert (agreement.interrupt, agreement.all_written) == (interrupt, written)


def test_weights_and_samples_are_added_and_a_request_is_sent_once() -> None:
    agreement = Agreement(Others(1.5, 3, 0, 0))
    agreement.request()
    agreement.batch_samples = 4
    agreement.start(torch.tensor(2.0))
    assert agreement.started
    assert (agreement.finish(), agreement.samples, agreement.interrupt) == (3.5, 7, True)
    agreement.interrupt = False
    agreement.start(1)
    assert (agreement.finish(), agreement.interrupt, agreement.started) == (2.5, False, False)


def test_an_interruption_lasts_until_it_is_handled() -> None:
    agreement = Agreement(Others(0, 0, 1, 0))
    agreement.start()
    agreement.finish()
    agreement.group = Others(0, 0, 0, 0)
    agreement.start()
    agreement.finish()
    assert agreement.interrupt


def test_a_stop_is_gathered_where_a_rank_has_one_and_that_of_the_lowest_rank_is_all_ranks() -> None:
    def share(threads: ThreadGroup) -> list[Any]:
        group = Adding(threads)
        requests = Requests(group, Agreement(group), None, may_hold=False)
        shared: list[Any] = [requests.share(7.25 + group.rank), requests.stop_request, group.gathered]
        if group.rank == 2:
            requests.evaluate()
        if group.rank > 0:
            requests.stop(Stop(f"of rank {group.rank}", finished=False))
        shared += [requests.share(9.5 - group.rank), requests.stop_request, requests.evaluation_requested]
        return [*shared, requests.roll_back_requested, group.gathered]

    expected = [7.25, None, 0, 9.5, Stop("of rank 1", finished=False), True, False, 1]
    assert on_ranks(3, share) == [expected] * 3


class Meanwhile(Adding):
    """Rank 0 requests something while the ranks exchange their requests, as another thread may."""

    def __init__(self, group: ThreadGroup) -> None:
        super().__init__(group)
        self.request: Callable[[], None] = lambda: None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = super().sum(tensor)
        if self.rank == 0:
            request, self.request = self.request, lambda: None
            request()
        return total


@pytest.mark.parametrize("kind", ["evaluate", "roll_back"])
def test_a_request_that_comes_during_the_exchange_is_of_all_ranks_at_the_next_one(kind: str) -> None:
    def take(threads: ThreadGroup) -> list[bool]:
        group = Meanwhile(threads)
        requests = Requests(group, Agreement(group), None, may_hold=False)
        group.request = getattr(requests, kind)
        taken = []
        for _ in range(3):
            evaluates = requests.take_evaluation(holds=False)
            taken.append(evaluates or requests.roll_back_requested)
            requests.end_roll_back()
        return taken

    assert on_ranks(2, take) == [[False, True, False]] * 2


def test_names_of_metrics_are_gathered_only_when_a_rank_has_counted_others() -> None:
    logs: list[list[dict[str, float]]] = [
        [{"a": 1.0}, {"a": 3.0}],
        [{"a": 2.0}, {"a": 2.0}],
        [{"a": 2.0}, {"a": 4.0, "b": 5.0}],
        [{"a": 0.0}, {"a": 1.0, "b": 6.0}],
        [{"a": 0.0}, {"a": 1.0}],
        [{"b": 1.0}, {"b": float("nan")}],
    ]

    def log(threads: ThreadGroup) -> list[Any]:
        group, meter, means = Adding(threads), WeightedMeans(torch.device("cpu")), []
        for outputs in logs:
            gathered = group.gathered
            meter.add(torch.tensor(0.5), outputs[group.rank], 4 * (1 + 2 * group.rank))
            means.append((meter.means(group), group.gathered - gathered))
            meter.reset()
        return means

    first, second = on_ranks(2, log)
    expected = [
        ({"loss": 0.5, "a": 2.5}, 1),
        ({"loss": 0.5, "a": 2.0}, 0),
        ({"loss": 0.5, "a": 3.5, "b": 5.0}, 1),
        ({"loss": 0.5, "a": 0.75, "b": 6.0}, 0),
        ({"loss": 0.5, "a": 0.75}, 1),
        ({"loss": 0.5, "b": pytest.approx(float("nan"), nan_ok=True)}, 1),
    ]
    assert first == expected
    assert second == expected


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
    monkeypatch.setattr(time, "sleep", lambda _: files[1].write_text("x"))
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
    def means(group: ProcessGroup, loss: float) -> Any:
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
