"""Which checkpoints there are, what each of them is, and what became of those that are gone. It writes none.

A `Catalog` lists the folder of a storage. An `Entry` is one checkpoint with its manifest, or with the reason why it is
not valid; a listing compares sizes, `Catalog.why_damaged` reads every byte. `newest_of_all` finds the checkpoint that a
run resumes from, over its own folder and its copies.

- A checkpoint without a manifest is partial, and never loaded. One whose manifest changes while it is examined is
  examined again, so that a save or a removal meanwhile is not taken for damage.
- Damaged checkpoints are quarantined only once an intact one was found. Nothing else here changes a checkpoint.
- Copies that a user made, and checkpoints that were replayed, count only if they are named.

`checkpoint_at` and `expanded` find checkpoints by paths, globs, URLs and archives, `ForeignKind` recognises those of
other programs by their content. `CheckpointHistory` appends to `checkpoints.jsonl`, which no save, load or removal
reads; `Life` and `Spent` are what it tells afterwards.

Begin with `catalog.py` `Entry` and `Catalog`, then `find.py`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
