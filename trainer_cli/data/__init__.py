"""Loaders whose order can be resumed at any batch, and the data sets that ship.

`as_loader` makes the loader of anything that holds data: `Loader` of a dataset, `StreamLoader` of an iterable dataset,
`UserLoader` of a DataLoader or another iterable, and `SharedLoader` divides one of them among ranks. All have the same
methods: `iterate(epoch, batch=, samples=)` enters an epoch anywhere, `state_dict` and `check_state` are the position.

- Order and random numbers of `Loader` are pure functions of (seed, epoch, index), see `order.py`: the same with any
  number of workers and ranks, and an epoch is entered in its middle without loading what was before.
- A dataset may draw random numbers: after each batch the random generators of the training are as before.
- Of a loader of the user the position is its own state, its sampler walked, or its batches replayed; the log says
  which (`promise`).
- All ranks have the same number of batches. One that has no sample left has a `PaddingBatch`, which does not count.
- `sample_digests` reads a few samples, by which a resume detects that the data has changed.

Nothing here knows of trainers or runs. Datasets that ship (`datasets.py`) are named by their public names, such as
`trainer_cli.Digits`.

Begin with `adapt.py`, then `order.py` and `loader.py`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
