"""Iterate loaders made by the user. A resume loads their state, walks their sampler, or replays their batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from trainer_cli.data.loader import LOADING, EpochParts, parts_of
from trainer_cli.data.order import sample_seed
from trainer_cli.data.position import (
    STATE_VERSION,
    PositionedLoader,
    check_batch_size,
    check_same,
    length_of,
)
from trainer_cli.data.random_state import kept_random_state, seed_random, seed_torch
from trainer_cli.data.rebuilt_loader import Fetcher, WalkedSampler, draws_from_torch_alone, rebuild_loader
from trainer_cli.data.repeats import STATE_STAYS, WORKERS_READ_THE_SAME, RepeatWatch
from trainer_cli.data.workers import WorkerProcesses
from trainer_cli.errors import UserError
from trainer_cli.layout import class_name
from trainer_cli.torch_compat import next_batch

_ANEW = "Give an object whose __iter__ starts anew, such as a DataLoader."


class UserLoader(PositionedLoader):
    """Iterate a loader made by the user: a DataLoader, or any object that can be iterated once an epoch.

    Before `iter()` and before each batch the random generators are seeded from (seed, epoch, batch), and restored
    afterwards. Of a plain DataLoader with samplers of torch, only torch's generator is seeded, until a batch draws from
    those of python or numpy; without workers this batch is loaded again with all of them seeded. A resume loads the
    state of a loader with `state_dict` and `load_state_dict`. For a plain DataLoader with a map-style dataset and no
    workers it walks the sampler past the samples already seen. For other loaders it replays the batches already seen,
    and drops them. Both start from the states that the torch generators of the loader and its samplers had at the start
    of the epoch.

    If the sampler is walked and the DataLoader makes batches of `batch_size` samples, a position counts samples, so
    the batch size may change inside an epoch. Otherwise it counts batches.

    `set_epoch` of the loader, and of loaders, samplers and datasets inside it, is called before each epoch. If the
    dataset has it, persistent workers are restarted for each epoch.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int) -> None:
        if _is_used_up(loader):
            raise UserError(
                f"{class_name(loader)} can be iterated only once, but every epoch and resume starts it again",
                where="data",
                cure=_ANEW,
            )
        self.loader = cast(Any, loader)
        self.seed = seed
        self.fingerprint: str | None = getattr(loader, "fingerprint", None)
        self.per_rank = _is_per_rank(loader)
        """Whether the loader yields different batches on each rank, so that positions differ."""
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._states = RepeatWatch(STATE_STAYS, loader, watches=self.stateful)
        stream = getattr(loader, "dataset", None)
        self._firsts = RepeatWatch(
            WORKERS_READ_THE_SAME,
            stream,
            watches=isinstance(stream, IterableDataset) and getattr(loader, "num_workers", 0) > 1,
        )
        self._epochs = EpochParts(loader, seed)
        self._is_torchs = isinstance(loader, DataLoader)
        self._renews = _keeps_workers(loader) and _dataset_has_epochs(loader, seed)
        """Whether workers must be restarted for each epoch: they are persistent, and their dataset has `set_epoch`."""
        stale = [inner for inner in parts_of(loader) if _keeps_workers(inner) and _dataset_has_epochs(inner, seed)]
        if stale and type(loader) is not DataLoader:
            raise UserError(
                f"the workers of {class_name(stale[0])} are kept from epoch to epoch, so set_epoch of their dataset "
                "would not reach them",
                where="data",
                cure="Make it with persistent_workers=False.",
            )
        self.persistent = _keeps_workers(loader) and not self._renews
        self._processes = WorkerProcesses()
        self._context = loader.multiprocessing_context if isinstance(loader, DataLoader) else None
        self._walked_sampler: WalkedSampler | None = None
        self._inner = self.loader
        self._fetcher: Fetcher | None = None
        self._seeds_all = not draws_from_torch_alone(loader)
        """Whether python's and numpy's generators are seeded, and not only torch's."""
        if not self._seeds_all and self.loader.num_workers == 0:
            self._fetcher = Fetcher(loader)
        self._is_started = False
        if self._is_torchs and type(self.loader) is DataLoader:
            self._rebuild()
        self.walks = self._walked_sampler is not None and self.loader.num_workers == 0
        self._counts_samples = self.walks and self.loader.batch_size is not None
        self.length = length_of(self.loader.sampler) if self._counts_samples else None
        """Number of samples in an epoch, if a position counts samples."""
        self.batch_size: int | None = None if self.length is None else self.loader.batch_size
        self.samples_per_batch = self.batch_size
        self.stated_batch_size: int | None = getattr(loader, "batch_size", None)
        """Attribute `batch_size` of the loader, if it has one."""
        self.batch_samples: int | None = None
        """Number of samples in the last batch; None if the loader is not torch's DataLoader itself, or does not make
        batches of samples."""
        self._position: tuple[int, int, Any] | None = None
        """(epoch, offset, state of the loader or of its generators) that a resume has loaded."""
        self._left_early = False
        self._generators = [] if self.stateful else generators_of(loader)
        self._epoch_start_states = self._initial_states = self._generator_states()

    @property
    def promise(self) -> str:
        """A sentence for the log: how exact a resume is."""
        name = class_name(self.loader)
        if self.stateful:
            text = (
                f"{name} saves and loads its own position, so a resume continues from it; "
                "it is exact if the loader's own state is."
            )
            if self._is_torchs and self.loader.num_workers:
                text += (
                    " The random generators of its workers are not part of it: samples that draw from them "
                    "differ after a resume inside an epoch."
                )
            return text
        if self.walks:
            return (
                f"{name} does not save its position, so a resume advances its sampler past the batches "
                "already seen, without loading them; it is exact if a sample depends on its index and the random "
                "generators of python, numpy and torch alone, and the sampler remembers nothing of earlier epochs "
                "but a torch generator, which is saved."
            )
        text = (
            f"{name} does not save its position, so a resume replays the batches of the "
            "epoch that were already seen and drops them; it is exact if the loader gives the same batches each "
            "time it is started with the same random seeds, and has no memory of earlier epochs but a torch "
            "generator, which is saved."
        )
        if self._renews:
            text += " Its workers are restarted for each epoch, as its dataset has set_epoch."
        elif self.persistent:
            text += (
                " Its persistent workers have one: their random numbers continue from epoch to epoch. Without "
                "persistent_workers, samples that draw any are the same after a resume."
            )
        return text

    def __len__(self) -> int:
        """Number of batches in an epoch. Raises TypeError if the loader has no length."""
        try:
            return len(self.loader)
        except RuntimeError as error:
            # Lightning's CombinedLoader has a length only once it is iterated.
            if isinstance(self.loader, Iterator):
                raise TypeError(str(error)) from error
            raise

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Generator[Any, None, None]:
        """Yield the batches of an epoch after its first `batch` batches, which held `samples` samples."""
        offset = self._offset(batch, samples)
        if offset < 0:
            raise ValueError(f"an epoch cannot be entered at {offset}, before its start")
        if offset == 0:
            self.begin(epoch)
        # Used once: a later epoch must not begin there again.
        position, self._position = self._position, None
        self._left_early = False
        self._states.begin()
        self._firsts.begin()
        replayed = 0 if self.walks else batch
        if position is not None and position[:2] == (epoch, offset):
            *_, state = position
            if self.stateful:
                self.loader.load_state_dict(state)
                replayed = 0
            else:
                self._set_generators(state)
        elif epoch == offset == 0:
            # Every evaluation is epoch 0, and must use the same samples.
            self._set_generators(self._initial_states)
        # After the states were set: a resume inside the epoch draws its order from these again.
        self._epoch_start_states = self._generator_states()
        return self._batches(epoch, batch - replayed, replayed, offset)

    def begin(self, epoch: int) -> None:
        """Ask for the number of samples in an epoch, after `set_epoch`."""
        self._epochs.set(epoch)
        if self._counts_samples:
            self.length = length_of(self.loader.sampler)

    def batches_after(self, samples: int) -> int:
        """Number of batches after the first `samples` samples of an epoch. Only if a position counts samples."""
        assert self.length is not None and self.batch_size is not None
        full, remainder = divmod(max(0, self.length - samples), self.batch_size)
        return full + (remainder > 0 and not self.loader.drop_last)

    def _offset(self, batch: int, samples: int) -> int:
        """The position inside an epoch: in samples if it counts them, else in batches."""
        return batch if self.length is None else samples

    def close(self) -> None:
        """End persistent workers. The next epoch starts new ones."""
        self._is_started = False
        if self._inner is not self.loader:
            # Asked first, so that the workers exit while the old iterator is dropped, which waits for them.
            self._processes.ask_to_end()
            self._rebuild()
            self._processes.end()
        elif self._is_torchs:
            self._processes.end(_shut_down_of(getattr(self.loader, "_iterator", None)))
            if self.persistent:
                # Otherwise torch would use the ended workers again. A loader without persistent workers keeps its
                # iterator, from which torchdata answers state_dict().
                self.loader._iterator = None

    def _rebuild(self) -> None:
        """Make the DataLoader again with a sampler that can be walked, and without workers of earlier epochs."""
        self._inner, self._walked_sampler = rebuild_loader(
            self.loader, self._processes, self._fetcher, persistent=self.persistent
        )

    def _batches(self, epoch: int, first: int, replayed: int, offset: int) -> Generator[Any, None, None]:
        """Yield the batches of an epoch from a position on, each made with the random generators seeded for it.

        Args:
            first: number of the first batch that the loader gives.
            replayed: number of batches that it gives again, and that are dropped.
            offset: number of entries of the sampler that are skipped.
        """
        # A kept worker may have died between two epochs: then new ones are started.
        if self._processes.died():
            self.close()
        if self.walks and self._walked_sampler is not None:
            self._walked_sampler.skip = offset
            self._walked_sampler.before = partial(self._seed_walk, epoch, offset, first)
        iterator: Any = None
        number = first
        try:
            with kept_random_state(), self._processes.starting(self._context):
                self._epochs.set(epoch)
                seed_random(sample_seed(self.seed, epoch, 0))
                if self.persistent and self._is_started:
                    # New workers draw a seed before the order is drawn. Draw it for persistent workers too.
                    torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
                iterator = iter(self._inner)
                self._is_started = self._walked_sampler is not None
            while True:
                # Not around the yield: the training draws its own random numbers.
                with kept_random_state() as state_before:
                    if self._epochs:
                        # An evaluation in between may have set the epoch of a shared dataset.
                        self._epochs.set(epoch)
                    seed = sample_seed(self.seed, epoch, number + 1)
                    if self._fetcher is not None:
                        self._fetcher.before, self._fetcher.seed = state_before, seed
                    self._seed(seed)
                    try:
                        batch = next(iterator) if self._fetcher is None else next_batch(iterator)
                    except StopIteration:
                        if number == 0 and isinstance(self.loader, Iterator):
                            raise UserError(
                                f"{class_name(self.loader)} gives no batch in epoch {epoch}: its __iter__ returns the "
                                "object itself and does not start anew",
                                where="data",
                                cure=_ANEW,
                            ) from None
                        return
                number += 1
                # Only until two states are known: a state may be large.
                if self._states.watches:
                    self._states.see(self.loader.state_dict())
                if self._inner is not self.loader:
                    self.batch_samples, batch = batch
                self._firsts.see(batch)
                if number > first + replayed:
                    yield batch
        except GeneratorExit:
            # After the last batch the epoch has ended, although no further batch was requested.
            if self.stateful:
                self._leave(iterator, epoch, number)
            raise
        except Exception as error:
            explained = self._processes.explained(error)
            explained.add_note(f"{LOADING} batch {number} of epoch {epoch}")
            if explained is error:
                raise
            raise explained from error
        finally:
            # Loaders of other classes end their processes themselves.
            if self._is_torchs and (not self.persistent or self._processes.died()):
                if self._inner is not self.loader:
                    self._processes.ask_to_end()
                else:
                    self._processes.end(_shut_down_of(iterator))
                iterator = None
                self.close()

    def _seed(self, seed: int) -> None:
        """Seed the generators from which the loader or its dataset may draw."""
        if self._seeds_all or (self._fetcher is not None and self._fetcher.seeds_all):
            seed_random(seed)
        else:
            seed_torch(seed)

    def _seed_walk(self, epoch: int, offset: int, first: int, number: int) -> None:
        """Seed as before the batch for which entry `number` of the sampler was drawn."""
        entries_per_batch = self.samples_per_batch or 1
        if number == offset:
            self._seed(sample_seed(self.seed, epoch, first + 1))
        elif number % entries_per_batch == 0:
            self._seed(sample_seed(self.seed, epoch, number // entries_per_batch + 1))

    def _leave(self, iterator: Iterator[Any], epoch: int, number: int) -> None:
        """Let the loader see the end of its epoch, so that its state becomes that of the next epoch."""
        try:
            is_last = number >= len(self)
        except TypeError:
            is_last = False
        self._left_early = not is_last
        if is_last:
            with kept_random_state():
                seed_random(sample_seed(self.seed, epoch, number + 1))
                next(iterator, None)

    def state_dict(self, epoch: int, samples: int = 0, batch: int = 0) -> dict[str, Any]:
        """The position, with the state of the loader if it has one that belongs to this position."""
        if batch == 0:
            self.begin(epoch)
        return {
            **self._identity(),
            "epoch": epoch,
            "batch": batch,
            "sample_offset": samples,
            "batch_size": self.stated_batch_size,
            "loader": None if batch == 0 and self._left_early else self._loader_state(),
            "generators": self._epoch_start_states if batch else self._generator_states(),
        }

    def _identity(self) -> dict[str, Any]:
        """The entries that must be equal in a resume."""
        return {
            "version": STATE_VERSION,
            "order": "stateful" if self.stateful else "sampler" if self.walks else "replay",
            "seed": self.seed,
            "length": self.length,
            "fingerprint": self.fingerprint,
        }

    def _loader_state(self) -> Any:
        """The state of the loader; None if it has none."""
        if not self.stateful:
            return None
        # torchdata's loader starts its workers here if there was no batch yet, and draws a seed for them.
        with kept_random_state(), self._processes.starting(self._context):
            return self.loader.state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Keep the saved state of the loader, or of its generators, for the next `iterate`.

        Raises:
            UserError: the position is in other data; all differences are named.
        """
        self.begin(state["epoch"])
        check_same(self._identity(), state, tuple(self._identity()))
        if self.length is None:
            check_batch_size(self.stated_batch_size, state)
        generators = state["generators"]
        if generators and len(generators) != len(self._generators):
            raise UserError(
                f"{class_name(self.loader)} has {len(self._generators)} torch generators, but the checkpoint has "
                f"{len(generators)}",
                where="data",
                cure="Resume with the same data, or start a new run from these weights with ckpt=.",
            )
        inner_state = state["loader"] if self.stateful else generators or None
        if inner_state is not None:
            self._position = (state["epoch"], self._offset(state["batch"], state["sample_offset"]), inner_state)

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        """Set the torch generators of the loader and its samplers to these states."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]


def _is_used_up(loader: Any) -> bool:
    """Whether a loader is an iterator that can certainly be iterated only once, such as a generator or a `zip`."""
    # A class with an __iter__ in Python may start again in it and return self, as Lightning's CombinedLoader does.
    method = getattr(type(loader), "__iter__", None)
    return isinstance(loader, Iterator) and (not inspect.isfunction(method) or method is Iterator.__iter__)


def _is_per_rank(data: Any) -> bool:
    """Whether a loader or a dataset yields different samples on each rank by itself."""
    is_distributed = isinstance(getattr(data, "sampler", None), DistributedSampler)
    return is_distributed or any(getattr(owner, "per_rank", False) for owner in (data, getattr(data, "dataset", None)))


def _shut_down_of(iterator: Any) -> Callable[[], None] | None:
    """The method by which an iterator of a DataLoader ends its workers, as torch calls it when the iterator is dropped.

    Without it, torch raises an error for workers that are killed.
    """
    return getattr(iterator, "_shutdown_workers", None)


def _keeps_workers(loader: Any) -> bool:
    """Whether a loader has persistent workers."""
    return bool(getattr(loader, "persistent_workers", False))


def _dataset_has_epochs(loader: Any, seed: int) -> bool:
    """Whether the dataset of a loader, or one inside it, has `set_epoch`."""
    return bool(EpochParts(getattr(loader, "dataset", None), seed))


def _with_samplers(loader: Any) -> list[Any]:
    """A loader, its samplers, and the sampler inside its batch sampler; None for those that it lacks."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def generators_of(loader: Any) -> list[torch.Generator]:
    """The torch generators of a loader, of those inside it, and of their samplers, without duplicates."""
    # By identity, because two generators in the same state are still two.
    by_id: dict[int, torch.Generator] = {}
    for inner in parts_of(loader):
        if inner is loader or isinstance(inner, DataLoader):
            for owner in _with_samplers(inner):
                generator = getattr(owner, "generator", None)
                if isinstance(generator, torch.Generator):
                    by_id[id(generator)] = generator
    return list(by_id.values())
