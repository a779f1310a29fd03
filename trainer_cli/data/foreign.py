"""A loader that the user brings: replayed or put back to its own position, with a sentence on what that promises."""

from __future__ import annotations

import atexit
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset

from trainer_cli.data.children import born_here, end_by_force
from trainer_cli.data.order import sample_seed
from trainer_cli.data.position import STATE_VERSION, check_same, type_name
from trainer_cli.data.randomness import kept_random_state, seed_random
from trainer_cli.errors import UserError


class ForeignLoader:
    """A loader that the user made: a DataLoader, or anything that can be iterated once an epoch.

    Before `iter()` and before each batch the random generators are seeded from (seed, epoch, batch), and put
    back afterwards. A loader that can save and load its own position, with `state_dict` and `load_state_dict`,
    is put there by a resume. Of a plain DataLoader of a map-style dataset without workers, a resume walks the
    sampler past the batches already seen; any other loader is replayed, and those batches dropped.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int) -> None:
        if isinstance(loader, Iterator):
            raise UserError(
                f"{type_name(loader)} can be iterated only once, but every epoch and resume starts it again",
                where="data",
                cure="Give an object whose __iter__ starts anew, such as a DataLoader or a list.",
            )
        self.loader = loader
        self.seed = seed
        self.fingerprint: str | None = getattr(loader, "fingerprint", None)
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        plain = type(loader) is DataLoader and loader.num_workers == 0
        self.walks = plain and not isinstance(cast(Any, loader).dataset, IterableDataset)
        self._position: tuple[int, int, Any] | None = None
        self._left_early = False

    @property
    def promise(self) -> str:
        """What its resume can promise, in a sentence."""
        if self.stateful:
            return (
                f"{type_name(self.loader)} saves and loads its own position, so a resume goes on where "
                "it says it stood; it is exact if the loader's own state is."
            )
        if self.walks:
            return (
                f"{type_name(self.loader)} has no position of its own, so a resume walks its sampler past the batches "
                "already seen, without loading them; it is exact if a sample depends on its index and the random "
                "generators of python, numpy and torch alone."
            )
        return (
            f"{type_name(self.loader)} has no position of its own, so a resume replays the batches of the "
            "epoch that were already seen and drops them; it is exact if the loader gives the same batches each "
            "time it is started with the same random seeds, and has no memory of earlier epochs."
        )

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
            cast(Any, self.loader).load_state_dict(position[2])
            skip = 0
        return self._batches(epoch, batch - skip, skip)

    def _batches(self, epoch: int, first: int, skip: int) -> Generator[Any, None, None]:
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        # Workers born here keep the parent's signals blocked, for good: they are for this process.
        with kept_random_state(), born_here() as workers:
            seed_random(sample_seed(self.seed, epoch, 0))
            iterator: Any = iter(self.loader)
        end = partial(end_by_force, workers)
        atexit.register(end)  # before multiprocessing's own, which would wait for them for ever
        number = first
        try:
            while True:
                with kept_random_state():
                    seed_random(sample_seed(self.seed, epoch, number + 1))
                    seen = number < first + skip
                    try:
                        batch = iterator._next_index() if seen and self.walks else next(iterator)
                    except StopIteration:
                        return
                    except Exception as error:
                        error.add_note(f"while loading batch {number} of epoch {epoch}")
                        raise
                number += 1
                if not seen:
                    yield batch
        except GeneratorExit:
            if self.stateful:
                self._leave(iterator, epoch, number)
            raise
        finally:
            if not getattr(self.loader, "persistent_workers", False):
                if workers:
                    iterator._shutdown_workers()
                end()
                atexit.unregister(end)

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
            "fingerprint": self.fingerprint,
            "loader": cast(Any, self.loader).state_dict() if own else None,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a position in other data; of a loader with its own state, keep it for the next `iterate`.

        Raises:
            UserError: naming everything that differs.
        """
        check_same(self.state_dict(0), state, ("version", "order", "seed", "fingerprint"))
        if state["loader"] is not None:
            self._position = (state["epoch"], state["batch"], state["loader"])
