"""The loss for displays: the mean since the last log, answered by the thread of the training at the next batch."""

from __future__ import annotations

import threading

import torch

from trainer_cli.outputs.metrics import WeightedMeans


def test_a_request_is_answered_at_the_next_batch_with_the_mean_since_the_last_log() -> None:
    means = WeightedMeans(torch.device("cpu"))
    means.add(torch.tensor(8.0), {}, 1)
    means.reset()
    assert means.live_loss.request() is None, "nothing was requested before"
    means.add(torch.tensor(1.0), {}, 3)
    means.add(torch.tensor(5.0), {}, 1)
    assert means.live_loss.request() == 1.0, "as it was at the request"
    means.add(torch.tensor(2.0), {}, torch.tensor(4.0))
    assert means.live_loss.request() == (3 + 5 + 8) / 8
    assert means.means() == {"loss": 2.0}


def test_batches_without_weight_leave_the_loss_as_it_was() -> None:
    means = WeightedMeans(torch.device("cpu"))
    means.live_loss.request()
    means.add(torch.tensor(3.0), {}, 2)
    means.reset()
    means.live_loss.request()
    means.add(torch.tensor(7.0), {}, 0)
    assert means.live_loss.request() == 3.0


def test_no_batch_is_read_without_a_request() -> None:
    means = WeightedMeans(torch.device("cpu"))
    means.add(torch.tensor(3.0), {}, 1)
    assert means.live_loss.request() is None
    reader = threading.Thread(target=means.live_loss.request)
    reader.start()
    reader.join()
    means.add(torch.tensor(5.0), {}, 1)
    assert means.live_loss.request() == 4.0
