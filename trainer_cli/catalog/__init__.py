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

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.catalog.catalog import (
        Catalog as Catalog,
        Check as Check,
        Entry as Entry,
        examine as examine,
        newest_of_all as newest_of_all,
        verify_and_decode as verify_and_decode,
    )
    from trainer_cli.catalog.find import (
        checkpoint_at as checkpoint_at,
        expanded as expanded,
        filled as filled,
        path_to_save as path_to_save,
        paths_of as paths_of,
        split_existing as split_existing,
    )
    from trainer_cli.catalog.foreign_kind import ForeignKind as ForeignKind, refuse_foreign as refuse_foreign
    from trainer_cli.catalog.history import CheckpointHistory as CheckpointHistory, Life as Life, Spent as Spent
    from trainer_cli.catalog.path_variables import rank_variables_in as rank_variables_in

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "catalog": "Catalog Check Entry examine newest_of_all verify_and_decode",
            "find": "checkpoint_at expanded filled path_to_save paths_of split_existing",
            "foreign_kind": "ForeignKind refuse_foreign",
            "history": "CheckpointHistory Life Spent",
            "path_variables": "rank_variables_in",
        },
    )
