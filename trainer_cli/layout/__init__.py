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

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.layout.naming import (
        CONFIG_FILE as CONFIG_FILE,
        COPIES_CACHE as COPIES_CACHE,
        MANIFEST_FILE as MANIFEST_FILE,
        MODEL_CONFIG_FILE as MODEL_CONFIG_FILE,
        PINNED_FILE as PINNED_FILE,
        STEP_MODULES as STEP_MODULES,
        SWEEP_FOLDER as SWEEP_FOLDER,
        VARIABLES as VARIABLES,
        Naming as Naming,
        class_name as class_name,
        in_runs as in_runs,
        is_plain as is_plain,
        is_run_id as is_run_id,
        numbers_within as numbers_within,
        parse_step as parse_step,
        step_within as step_within,
    )
    from trainer_cli.layout.parts import PartTable as PartTable
    from trainer_cli.layout.shards import PER_RANK as PER_RANK, Shard as Shard, spread as spread

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "naming": (
                "class_name CONFIG_FILE COPIES_CACHE in_runs is_plain is_run_id MANIFEST_FILE MODEL_CONFIG_FILE "
                "Naming numbers_within parse_step PINNED_FILE STEP_MODULES step_within SWEEP_FOLDER VARIABLES"
            ),
            "parts": "PartTable",
            "shards": "PER_RANK Shard spread",
        },
    )
