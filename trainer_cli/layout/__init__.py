"""How files and folders of runs and checkpoints are called, and which part of a tensor each file of a checkpoint has.

Plain values: nothing here reads the disk, but for `in_runs`, or imports torch. What is written here is on users' disks,
so that a change of it needs a reader of the old form.

- Names: `Naming` makes the names of a run's checkpoints from a pattern, and refuses patterns whose names would not all
  differ and sort by step. `parse_step` reads the default names, `step_within` any with `step` and a number. A name of a
  folder or file that comes from a manifest, an archive or a store is a path only after `is_plain`.
- Parts: a `Shard` is a box of a tensor, `PartTable` says which file has which box of which tensor. Parts of one tensor
  make a whole, each element once (`PartTable.why_uncovered`), or the checkpoint is not committed. `spread` gives the
  same plan on every rank, without communication.

Begin with `naming.py`; then `shards.py`, whose arithmetic a test compares with torch.distributed.checkpoint.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
