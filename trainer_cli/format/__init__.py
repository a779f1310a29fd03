"""How a state tree becomes the files of a checkpoint, and files a state tree.

A `Format` plans a `FileLayout` from a tree (no tensor is copied, no file is opened), the layout writes itself into a
folder, and `read` returns the tree as it was written: values exactly, tensors bit for bit, tied tensors as one tensor
and views as views. A value that a checkpoint cannot contain is refused by `plan`, with its path in the tree. Nothing of
a file is used before its digest was verified, and no code in a file is ever run.

- `encode` and `decode` (`tree.py`) are the one walk over a tree: a new kind of leaf is added there.
- `TensorsFormat` is the default format of one process, `ShardedFormat` that of ranks: each rank computes alone which
  parts it writes, and any number of ranks can read them.
- `CheckpointReader` reads by the format that a manifest names; `new_format` finds it, here or among the add-ons' parts
  `format.NAME`. A `DividedFormat` can save the parts that ranks have. `check_readable` decodes without keeping.
- `StoredState` is a checkpoint as it is stored, for what shows it: tensors by name, without loading torch.

What was written by an earlier version must load: tags are added, never changed. Folders, their commit and the
manifest are not known here (`trainer_cli.storage`, `trainer_cli.checkpoint`). Begin with `base.py`, then `tree.py` and
`sharded.py`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
