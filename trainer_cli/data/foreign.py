"""A loader that the user brings: replayed or put back to its own position, with a sentence on what that promises."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer_cli.data.children import born_here, end_at_exit, end_by_force
from trainer_cli.data.inhand import InHand
from trainer_cli.data.order import sample_seed
from trainer_cli.data.position import STATE_VERSION, check_batch_size, check_same, type_name
from trainer_cli.data.randomness import kept_random_state, seed_random
from trainer_cli.errors import UserError


class ForeignLoader:
    """A loader that the user made: a DataLoader, or anything that can be iterated once an epoch.

    Before `iter()` and before each batch the random generators are seeded from (seed, epoch, batch), and put
    back afterwards. A loader that can save and load its own position, with `state_dict` and `load_state_dict`,
    is put there by a resume. Of a plain DataLoader of a map-style dataset without workers, a resume walks the
    sampler past the batches already seen; any other loader is replayed, and those batches dropped. Either begins
    with the states that the torch generators of the loader and its samplers had at the beginning of the epoch; the
    first epoch, with those they were given in.

    Whatever has a `set_epoch`, of the loader, its samplers and its dataset, is told each epoch before it begins.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int) -> None:
        if isinstance(loader, Iterator):
            raise UserError(
                f"{type_name(loader)} can be iterated only once, but every epoch and resume starts it again",
                where="data",
                cure="Give an object whose __iter__ starts anew, such as a DataLoader.",
            )
        self.loader = loader
        self.seed = seed
        self.fingerprint: str | None = getattr(loader, "fingerprint", None)
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        plain = type(loader) is DataLoader and loader.num_workers == 0
        self.walks = plain and not isinstance(cast(Any, loader).dataset, IterableDataset)
        self._position: tuple[int, int, Any] | None = None
        self._left_early = False
        self._kept: list[Any] = []
        """Workers that live over epochs,"""
        self._keeper: Any = None
        """and the iterator that keeps them."""
        self._generators = [] if self.stateful else _generators(loader)
        self._begun_with = self._given = self._generator_states()

    @property
    def promise(self) -> str:
        """What its resume can promise, in a sentence."""
        if self.stateful:
            told = (
                f"{type_name(self.loader)} saves and loads its own position, so a resume goes on where "
                "it says it stood; it is exact if the loader's own state is."
            )
            if isinstance(self.loader, DataLoader) and self.loader.num_workers:
                told += (
                    " The random generators of its workers are not part of it: samples that draw from them are "
                    "others after a resume inside an epoch."
                )
            return told
        if self.walks:
            return (
                f"{type_name(self.loader)} has no position of its own, so a resume walks its sampler past the batches "
                "already seen, without loading them; it is exact if a sample depends on its index and the random "
                "generators of python, numpy and torch alone, and the sampler remembers nothing of earlier epochs "
                "but a torch generator, which is saved."
            )
        told = (
            f"{type_name(self.loader)} has no position of its own, so a resume replays the batches of the "
            "epoch that were already seen and drops them; it is exact if the loader gives the same batches each "
            "time it is started with the same random seeds, and has no memory of earlier epochs but a torch "
            "generator, which is saved."
        )
        if getattr(self.loader, "persistent_workers", False):
            told += (
                " Its persistent workers have one: their random numbers go on from epoch to epoch. Without "
                "persistent_workers, samples that draw any are the same after a resume."
            )
        return told

    def __len__(self) -> int:
        """Batches of an epoch. TypeError where the loader cannot tell."""
        return len(cast(Any, self.loader))

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Generator[Any, None, None]:
        """The batches of an epoch after its first `batch` batches. `samples` is not needed here."""
        if batch < 0:
            raise ValueError(f"an epoch cannot be entered {-batch} batches before its start")
        position, self._position = self._position, None
        self._left_early = False
        skip = batch
        if position is not None and position[:2] == (epoch, batch):
            if self.stateful:
                cast(Any, self.loader).load_state_dict(position[2])
                skip = 0
            else:
                self._set_generators(position[2])
        elif epoch == batch == 0:
            # So that every evaluation, which is a first epoch, sees the same samples.
            self._set_generators(self._given)
        self._begun_with = self._generator_states()
        return self._batches(epoch, batch - skip, skip)

    def _batches(self, epoch: int, first: int, skip: int) -> Generator[Any, None, None]:
        for part in (*_samplers(self.loader), getattr(self.loader, "dataset", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        in_hand = InHand(self.loader, epoch, first)
        persistent = getattr(self.loader, "persistent_workers", False)
        if _one_died(self._kept):
            self.end()
        # Workers born here keep the parent's signals blocked, for good: they are for this process.
        with kept_random_state(), born_here() as born:
            seed_random(sample_seed(self.seed, epoch, 0))
            if persistent and getattr(self.loader, "_iterator", None) is not None:
                # Workers that are kept need no seed. The order comes after it, and must be that of new ones.
                torch.empty((), dtype=torch.int64).random_(generator=cast(Any, self.loader).generator)
            iterator: Any = in_hand.begin()
        workers: list[Any] = []
        if getattr(iterator, "_persistent_workers", False):
            workers, self._keeper = self._kept, iterator
            end_at_exit(self)
        # What a loader of another kind starts is its own affair.
        workers += born if hasattr(iterator, "_shutdown_workers") else []
        number = first
        try:
            while True:
                with kept_random_state():
                    seed_random(sample_seed(self.seed, epoch, number + 1))
                    seen = number < first + skip
                    in_hand.wait(number)
                    try:
                        batch = iterator._next_index() if seen and self.walks else next(iterator)
                    except StopIteration:
                        return
                    except Exception as error:
                        in_hand.tell(error)
                        raise
                number += 1
                if not seen:
                    yield batch
        except GeneratorExit:
            if self.stateful:
                self._leave(iterator, epoch, number)
            raise
        finally:
            in_hand.end()
            # One that died may have left a lock behind, at which the others wait for ever.
            if workers is not self._kept or _one_died(workers):
                self._end_workers(iterator, workers)

    def end(self) -> None:
        """End workers that live over epochs; the next epoch begins with new ones."""
        self._end_workers(self._keeper, self._kept)

    def _end_workers(self, iterator: Any, workers: list[Any]) -> None:
        """End the workers of a torch iterator, by force if need be."""
        try:
            if workers:
                iterator._shutdown_workers()
        finally:
            end_by_force(workers)
            if workers is self._kept and isinstance(self.loader, DataLoader):
                self.loader._iterator = None
            workers.clear()

    def _leave(self, iterator: Iterator[Any], epoch: int, number: int) -> None:
        """Let the loader see that its epoch is over. One left before its end tells no beginning of the next."""
        try:
            whole = number >= len(self)
        except TypeError:
            whole = False
        self._left_early = not whole
        if whole:
            with kept_random_state():
                seed_random(sample_seed(self.seed, epoch, number + 1))
                next(iterator, None)

    def state_dict(self, epoch: int, samples: int = 0, batch: int = 0) -> dict[str, Any]:
        """Where the data stands; with the loader's own state if it has one that tells this place."""
        own = self.stateful and not (batch == 0 and self._left_early)
        return {
            "version": STATE_VERSION,
            "order": "stateful" if self.stateful else "replay",
            "seed": self.seed,
            "epoch": epoch,
            "batch": batch,
            "batch_size": getattr(self.loader, "batch_size", None),
            "fingerprint": self.fingerprint,
            "loader": cast(Any, self.loader).state_dict() if own else None,
            "generators": self._begun_with if batch else self._generator_states(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a position in other data; keep the loader's own state, or its generators', for the next `iterate`.

        Raises:
            UserError: naming everything that differs.
        """
        check_same(self.state_dict(0), state, ("version", "order", "seed", "fingerprint"))
        check_batch_size(getattr(self.loader, "batch_size", None), state)
        # Checkpoints of before they were saved have none.
        generators = state.get("generators") or []
        if generators and len(generators) != len(self._generators):
            raise UserError(
                f"{type_name(self.loader)} has {len(self._generators)} torch generators, but the checkpoint has "
                f"{len(generators)}",
                where="data",
                cure="Resume with the same data, or start a new run from these weights with ckpt=.",
            )
        own = state["loader"] if self.stateful else generators or None
        if own is not None:
            self._position = (state["epoch"], state["batch"], own)

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]


def _one_died(workers: Iterable[Any]) -> bool:
    return any(not worker.is_alive() for worker in workers)


def _samplers(loader: Any) -> list[Any]:
    """What decides on a loader's order: itself and its samplers, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return list({id(one): one for one in found if one is not None}.values())


def _generators(loader: Any) -> list[torch.Generator]:
    """The torch generators of a loader and its samplers, each once."""
    found = (getattr(one, "generator", None) for one in _samplers(loader))
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
