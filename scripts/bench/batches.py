"""Seconds to the batch after k others, at a resume deep inside a shuffled epoch: `train`, torch, accelerate, torchdata.

The steps before are not trained: each loader is told its position as its own resume tells it, and gives one batch.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from settings import Settings
from table import Column, Row, Table
from timing import Skipped, asked, interleaved, require

BATCH = 2
NAMES = ("train", "DataLoader, walked", "accelerate", "StatefulDataLoader")
LIMIT_S = 120.0


class Numbers:
    """Each sample is its index."""

    deterministic = True

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def measure(settings: Settings) -> list[Table]:
    """One table with a plot; each figure of a process of its own."""
    counts = settings.pick(smoke=[10], quick=[1000, 100_000], whole=[1000, 10_000, 100_000, 1_000_000, 10_000_000])
    measures = {
        f"{name}, batch {count:,}": partial(_measured, name, count, max(counts)) for count in counts for name in NAMES
    }
    if settings.small:
        measures = {row: work for row, work in measures.items() if row.startswith(("train", "DataLoader"))}
    needed = [row for row in measures if row.startswith("train")]
    samples, skipped = interleaved(measures, settings.rounds_or(1, 1), warm=0, needed=needed)
    rows = []
    for count in counts:
        for name in NAMES:
            row = f"{name}, batch {count:,}"
            if row in samples:
                rows.append(Row(row, samples[row], f"train, batch {count:,}", series=name, x=float(count)))
    notes = [
        f"Batches of {BATCH} in random order, of a map-style data set of {BATCH * max(counts):,} samples that take no "
        "time to load; from the loader's construction to the batch. `accelerate` is `skip_first_batches`, which HF "
        "Trainer "
        "calls too. `StatefulDataLoader` is torchdata's, whose state Lightning restores; with a DataLoader, Lightning "
        "warns and begins the epoch's data again. A DataLoader itself has no position: its sampler is iterated. Their "
        "minimum is the permutation of the whole data set, which each computes at every start; `train` computes the "
        "position of a sample when it is needed."
    ]
    title = "To the batch after so many others, at a resume"
    columns = [Column("time", "s", 4, resolution=0.002)]
    settled = {"counts": counts, "batch": BATCH}
    return [Table("batches", title, "", columns, rows, settled, skipped, notes, x_label="batches before")]


def _measured(name: str, count: int, longest: int) -> dict[str, float]:
    return {"time": asked((sys.executable, __file__, name, str(count), str(longest)), limit_s=LIMIT_S)}


def by_train(data: Any, count: int) -> Any:
    from trainer_cli.data.loader import Loader

    return next(iter(Loader(data, BATCH, shuffle=True, seed=7).iterate(3, samples=count * BATCH)))


def by_dataloader(data: Any, count: int) -> Any:
    from torch.utils.data import DataLoader

    iterator: Any = iter(DataLoader(data, BATCH, shuffle=True))
    for _ in range(count):
        iterator._next_index()
    return next(iterator)


def by_accelerate(data: Any, count: int) -> Any:
    from accelerate import skip_first_batches
    from torch.utils.data import DataLoader

    return next(iter(skip_first_batches(DataLoader(data, BATCH, shuffle=True), count)))


def by_stateful(data: Any, count: int, state: dict[str, Any]) -> Any:
    """The state is one of another position, moved to this one."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    positions = state["_sampler_iter_state"]
    positions["samples_yielded"] = positions["sampler_iter_state"]["yielded"] = count * BATCH
    state["_sampler_iter_yielded"] = state["_num_yielded"] = count
    loader = StatefulDataLoader(data, BATCH, shuffle=True)
    loader.load_state_dict(state)
    return next(iter(loader))


def ready(name: str, count: int, longest: int) -> Callable[[], Any]:
    """What gives the batch; all that a resumed process has imported is imported here."""
    data: Any = Numbers(BATCH * (longest + 1))
    if name == "StatefulDataLoader":
        require("torchdata")
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(Numbers(len(data)), BATCH, shuffle=True)
        for _ in islice(loader, 3):
            pass
        return partial(by_stateful, data, count, loader.state_dict())
    if name == "accelerate":
        require("accelerate")
    work = {"train": by_train, "DataLoader, walked": by_dataloader, "accelerate": by_accelerate}[name]
    work(Numbers(4 * BATCH), 1)
    return partial(work, data, count)


def main(arguments: Sequence[str]) -> None:
    warnings.filterwarnings("ignore")
    name, count, longest = arguments[0], int(arguments[1]), int(arguments[2])
    try:
        work = ready(name, count, longest)
    except Skipped as reason:
        print(json.dumps({"skipped": str(reason)}))
        return
    began = time.perf_counter()
    work()
    print(json.dumps(time.perf_counter() - began))


if __name__ == "__main__":
    main(sys.argv[1:])
