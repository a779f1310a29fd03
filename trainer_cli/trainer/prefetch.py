"""The batches of an epoch, on the device: on CUDA the next one is copied while this one is trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from trainer_cli.core.progress import Progress
from trainer_cli.data.loader import Filler
from trainer_cli.errors import UserError
from trainer_cli.parallel.process_group import ProcessGroup
from trainer_cli.parallel.same import check_same_samples
from trainer_cli.trainer.metrics import tensors_of, to_device

log = logging.getLogger(__name__)


class DevicePrefetcher(Protocol):
    """Copies batches to the model's device."""

    ahead: bool
    """Whether batches should be sent ahead."""

    def send(self, batch: Any) -> Any:
        """Start to copy a batch; `receive` takes the returned value."""

    def receive(self, sent: Any) -> Any:
        """The batch, ready for kernels launched from now on."""


class Direct:
    """Copies a batch when it is needed; does nothing on the CPU."""

    ahead = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moves = device.type != "cpu"

    def send(self, batch: Any) -> Any:
        return batch

    def receive(self, sent: Any) -> Any:
        return to_device(sent, self._device) if self._moves else sent


class SideStream:
    """Copies on a side stream, in parallel with the kernels of the previous step, without a wait of the host. From
    pageable memory the copy is not parallel.
    """

    ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: Any) -> Any:
        if any(tensor.is_cuda for tensor in tensors_of(batch)):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = to_device(batch, self._device)
            return moved, self._stream.record_event()

    def receive(self, sent: Any) -> Any:
        moved, arrived = sent
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        for tensor in tensors_of(moved):
            # Memory of the side stream may be reused only after this step's kernels.
            if tensor.is_cuda:
                tensor.record_stream(current)
        return moved


class FillerPrefetcher:
    """Copies batches of one of several ranks; `counts` says whether the batch last received is no `Filler`.

    The first batch is compared with those of the other ranks of a tensor group.
    """

    def __init__(self, prefetcher: DevicePrefetcher, group: ProcessGroup) -> None:
        self._prefetcher, self.ahead = prefetcher, prefetcher.ahead
        self.counts = True
        self._unchecked = group if group.tensor_size > 1 else None

    def send(self, batch: Any) -> Any:
        return Filler(self._prefetcher.send(batch.batch)) if type(batch) is Filler else self._prefetcher.send(batch)

    def receive(self, sent: Any) -> Any:
        self.counts = type(sent) is not Filler
        batch = self._prefetcher.receive(sent if self.counts else sent.batch)
        if self._unchecked is not None:
            check_same_samples(self._unchecked, tensors_of(batch))
            self._unchecked = None
        return batch


def device_prefetcher(device: torch.device) -> DevicePrefetcher:
    """The prefetcher of a device."""
    return SideStream(device) if device.type == "cuda" else Direct(device)


def close_at_the_end(close: Callable[[], None]) -> None:
    """Close what loads data where nothing more is needed of it.

    An error is a warning: it must not replace the result of a training that has saved, nor the error that ended one.
    """
    try:
        close()
    except Exception as error:
        log.warning("a loader did not end cleanly: %s: %s", type(error).__name__, error)


class TrainBatches:
    """The batches of a train loader, epoch by epoch, from the position in `Progress`."""

    def __init__(self, loader: Any, prefetcher: DevicePrefetcher, length: int | None) -> None:
        self._loader, self._prefetcher, self._length = loader, prefetcher, length
        self.samples_per_batch: int | None = getattr(loader, "samples_per_batch", None)
        """Samples by which a batch advances the loader's position; None if the loader does not count samples."""
        self.batch_samples: int | None = None
        """Samples of the batch that `next` gave last; None if the loader does not say."""
        self._stateful = bool(getattr(loader, "stateful", False))
        self._iterator: Iterator[Any] | None = None
        self._ahead: list[tuple[Any, int | None]] = []
        self._ahead_state: dict[str, Any] | None = None

    def next(self, at: Progress) -> Any:
        """The next batch, on the device.

        Raises:
            UserError: the loader ended before its length.
        """
        if self._ahead:
            sent, self.batch_samples = self._ahead.pop()
            return self._prefetcher.receive(sent)
        if self._iterator is None:
            self._iterator = iter(self._loader.iterate(at.epoch, batch=at.batch, samples=at.epoch_samples))
        try:
            batch = next(self._iterator)
            self.batch_samples = self._loader.batch_samples
            return self._prefetcher.receive(self._prefetcher.send(batch))
        except StopIteration:
            raise UserError(
                f"the train loader ended after {at.batch} batches of epoch {at.epoch}"
                + (f", but {self._length} were to come" if self._length is not None else ""),
                cure="Check the loader's length, and loop.limit_train_batches.",
            ) from None

    def is_over(self, at: Progress) -> bool:
        """Whether the epoch is over after this batch. May send the next batch to the device.

        A loader without length must be asked for a batch, to see whether there is one. One that has both a length and a
        position of its own is not: its state before would have to be taken for each batch.
        """
        assert self._iterator is not None
        last = at.batch == self._length
        if self._length is not None and (last or self._stateful or not self._prefetcher.ahead):
            return last
        if self._stateful:
            self._ahead_state = self._state(at)
        try:
            batch = next(self._iterator)
            self._ahead.append((self._prefetcher.send(batch), self._loader.batch_samples))
        except StopIteration:
            # One that ends before its length is reported when the batch is needed.
            return self._length is None
        return False

    def state(self, at: Progress) -> dict[str, Any]:
        """The loader's position after the last batch trained on, not after one fetched ahead."""
        return self._ahead_state or self._state(at)

    def _state(self, at: Progress) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict(at.epoch, samples=at.epoch_samples, batch=at.batch)
        return state

    def end(self) -> None:
        """End the training's last epoch. An error is a warning, as in `close_at_the_end`."""
        close_at_the_end(self.close)

    def close(self) -> None:
        """End the epoch; the next batch begins another."""
        iterator, self._iterator = self._iterator, None
        self._ahead.clear()
        self._ahead_state = None
        if (close := getattr(iterator, "close", None)) is not None:
            close()
