"""What one rank's agreement makes of the sums of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_cli.parallel.agreement import Agreement
from trainer_cli.parallel.process_group import ProcessGroup


class Others(ProcessGroup):
    """A group in which the other ranks add given numbers: weight, samples, requests, written, failed."""

    def __init__(self, *numbers: float, world_size: int = 2) -> None:
        self.world_size = world_size  # type: ignore[misc]
        self.numbers = torch.tensor(numbers, dtype=torch.float64)

    def start_sum(self, tensor: torch.Tensor) -> Any:
        tensor += self.numbers
        return None


@pytest.mark.parametrize(
    ("others", "own", "interrupt", "written", "failed"),
    [
        ((0, 0, 0, 0, 0), {}, False, False, False),
        ((0, 0, 1, 0, 0), {}, True, False, False),
        ((0, 0, 0, 1, 0), {}, False, False, False),
        ((0, 0, 0, 1, 0), {"written": True}, True, True, False),
        ((0, 0, 0, 0, 1), {"written": True}, True, False, True),
        ((0, 0, 0, 0, 0), {"failed": True}, True, False, True),
    ],
)  # fmt: skip
def test_all_written_any_failed_or_a_request_interrupts(
    others: tuple[float, ...], own: dict[str, bool], interrupt: bool, written: bool, failed: bool
) -> None:
    agreement = Agreement(Others(*others))
    agreement.report(**own)
    agreement.start()
    agreement.finish()
    assert (agreement.interrupt, agreement.all_written, agreement.any_failed) == (interrupt, written, failed)


def test_weights_and_samples_are_added_and_a_request_is_sent_once() -> None:
    agreement = Agreement(Others(1.5, 3, 0, 0, 0))
    agreement.request()
    agreement.batch_samples = 4
    agreement.start(torch.tensor(2.0))
    assert agreement.started
    assert (agreement.finish(), agreement.samples, agreement.interrupt) == (3.5, 7, True)
    agreement.interrupt = False
    agreement.start(1)
    assert (agreement.finish(), agreement.interrupt, agreement.started) == (2.5, False, False)


def test_an_interruption_lasts_until_it_is_handled() -> None:
    agreement = Agreement(Others(0, 0, 1, 0, 0))
    agreement.start()
    agreement.finish()
    agreement.group = Others(0, 0, 0, 0, 0)
    agreement.start()
    agreement.finish()
    assert agreement.interrupt
