"""Copy batches to the device. On CUDA the next batch is copied while the current one is trained on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from trainer_cli.batches import tensors_of, to_device
from trainer_cli.data import PaddingBatch
from trainer_cli.errors import UserError
from trainer_cli.parallel import ProcessGroup, check_same_samples
from trainer_cli.steps import Progress
from trainer_cli.terminal import format_count
from trainer_cli.trainer.time_account import TimeAccount

log = logging.getLogger(__name__)


class DevicePrefetcher(Protocol):
    """Copy batches to the model's device."""

    ahead: bool
    """Whether a batch should be sent before the previous one has been trained on."""
    counts: bool
    """Whether the last received batch is not a `PaddingBatch`."""

    def send(self, batch: Any) -> Any:
        """Start to copy a batch. The result is passed to `receive`."""

    def receive(self, sent: Any) -> Any:
        """The batch on the device, ready for kernels that are launched after this call."""


class Direct:
    """Copy a batch when it is needed; does nothing on the CPU."""

    ahead, counts = False, True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moves = device.type != "cpu"

    def send(self, batch: Any) -> Any:
        return batch

    def receive(self, sent: Any) -> Any:
        return to_device(sent, self._device) if self._moves else sent


class SideStream:
    """Copy on a side stream, in parallel with the kernels of the previous step. The host does not wait.

    A copy from pageable memory is not parallel.
    """

    ahead, counts = True, True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: Any) -> Any:
        if any(tensor.is_cuda for tensor in tensors_of(batch)):
            # A loader computed it on the current stream, perhaps with kernels that have not ended.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = to_device(batch, self._device)
            return moved, self._stream.record_event()

    def receive(self, sent: Any) -> Any:
        moved, arrived = sent
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        for tensor in tensors_of(moved):
            # Without this the allocator may reuse the memory before the kernels of this step have ended.
            if tensor.is_cuda:
                tensor.record_stream(current)
        return moved


class PaddingPrefetcher:
    """Copy batches of a rank, of which some may be padding.

    The first batch is compared with those of the other ranks of a tensor parallel group.
    """

    def __init__(self, prefetcher: DevicePrefetcher, group: ProcessGroup) -> None:
        self._prefetcher, self.ahead = prefetcher, prefetcher.ahead
        self.counts = True
        self._unchecked = group if group.tensor_size > 1 else None

    def send(self, batch: Any) -> Any:
        return (
            PaddingBatch(self._prefetcher.send(batch.batch))
            if type(batch) is PaddingBatch
            else self._prefetcher.send(batch)
        )

    def receive(self, sent: Any) -> Any:
        self.counts = type(sent) is not PaddingBatch
        # A padding batch is copied too: its forward runs for the collectives.
        batch = self._prefetcher.receive(sent if self.counts else sent.batch)
        if self._unchecked is not None:
            check_same_samples(self._unchecked, tensors_of(batch))
            self._unchecked = None
        return batch


def device_prefetcher(device: torch.device) -> DevicePrefetcher:
    """Make the prefetcher for a device."""
    return SideStream(device) if device.type == "cuda" else Direct(device)


def close_at_the_end(close: Callable[[], None]) -> None:
    """Close a loader at the end of a training or an evaluation.

    An error is logged as a warning, because it must not replace the result, or the error that ended the training.
    """
    try:
        close()
    except Exception as error:
        log.warning("a loader did not end cleanly: %s: %s", type(error).__name__, error)


class TrainBatches:
    """Iterate over the epochs of a train loader, from the position in `Progress`.

    Args:
        account: in which the time of waiting for batches is counted.
    """

    def __init__(self, loader: Any, prefetcher: DevicePrefetcher, length: int | None, account: TimeAccount) -> None:
        self._loader, self.prefetcher, self.length, self._account = loader, prefetcher, length, account
        self.samples_per_batch: int | None = getattr(loader, "samples_per_batch", None)
        """Number of samples by which a batch advances the loader's position; None if the loader does not count them."""
        self.batch_samples: int | None = None
        """Number of samples in the last batch; None if the loader does not state it."""
        self._stateful = bool(getattr(loader, "stateful", False))
        self._iterator: Iterator[Any] | None = None
        self._ahead: list[tuple[Any, int | None]] = []
        """At most one batch sent ahead, with its number of samples."""
        self._ahead_state: dict[str, Any] | None = None
        """State of the loader before the batch in `_ahead` was fetched."""
        self._ahead_position = (0, 0)
        """Epoch and batch of that state."""

    @classmethod
    def on_host(cls, loader: Any, length: int | None) -> TrainBatches:
        """The batches as the loader makes them, on the host and not sent ahead. The time of waiting is not counted."""
        return cls(loader, Direct(torch.device("cpu")), length, TimeAccount())

    def next(self, progress: Progress) -> Any:
        """The next batch, on the device.

        Raises:
            UserError: the loader ended before its length.
        """
        if self._ahead:
            sent, self.batch_samples = self._ahead.pop()
            return self.prefetcher.receive(sent)
        began = time.monotonic()
        if self._iterator is None:
            # Made at the first batch, so that workers start only when the training does.
            self._iterator = iter(
                self._loader.iterate(progress.epoch, batch=progress.batch, samples=progress.epoch_samples)
            )
        try:
            batch = next(self._iterator)
            self.batch_samples = self._loader.batch_samples
            self._account.data_s += time.monotonic() - began
            return self.prefetcher.receive(self.prefetcher.send(batch))
        except StopIteration:
            raise UserError(
                f"the train loader ended after {format_count(progress.batch, 'batch')} of epoch {progress.epoch}"
                + (f", but {self.length} were expected" if self.length is not None else ""),
                cure="Check the loader's length, and loop.limit_train_batches.",
            ) from None

    def is_over(self, progress: Progress) -> bool:
        """Whether this was the last batch of the epoch. May send the next batch to the device.

        For a loader without a length, only a fetch shows whether there is another batch. From a loader with a length
        and a state, no batch is fetched ahead, because the state would have to be copied before each fetch.
        """
        assert self._iterator is not None
        is_last = progress.batch == self.length
        sends_ahead = self.prefetcher.ahead and not self._stateful
        if self.length is not None and (is_last or not sends_ahead):
            return is_last
        if self._stateful:
            self._ahead_state, self._ahead_position = self._state(progress), (progress.epoch, progress.batch)
        began = time.monotonic()
        try:
            batch = next(self._iterator)
            self._account.data_s += time.monotonic() - began
            self._ahead.append((self.prefetcher.send(batch), self._loader.batch_samples))
        except StopIteration:
            # A loader that ends before its length is reported when the batch is needed.
            return self.length is None
        return False

    def state(self, progress: Progress) -> dict[str, Any]:
        """The state of the loader after the last batch trained on, not after one fetched ahead."""
        # A state of another position is left where a checkpoint was loaded after the training.
        is_of_position = self._ahead_position == (progress.epoch, progress.batch)
        if self._ahead_state is not None and is_of_position:
            return self._ahead_state
        return self._state(progress)

    def _state(self, progress: Progress) -> dict[str, Any]:
        """The loader's own state at the position in `progress`."""
        state: dict[str, Any] = self._loader.state_dict(
            progress.epoch, samples=progress.epoch_samples, batch=progress.batch
        )
        return state

    def end(self) -> None:
        """End the last epoch of a training. See `close_at_the_end` for errors."""
        # The state stays: a checkpoint that is saved after the training does not leave out a batch sent ahead.
        close_at_the_end(self._close_iterator)

    def close(self) -> None:
        """End the epoch. The next batch begins another."""
        self._ahead_state = None
        self._close_iterator()

    def _close_iterator(self) -> None:
        """Close the iterator of the epoch, and drop a batch sent ahead."""
        # Forgotten first: an error of its close must not make the next epoch continue with it.
        iterator, self._iterator = self._iterator, None
        self._ahead.clear()
        if (close := getattr(iterator, "close", None)) is not None:
            close()
