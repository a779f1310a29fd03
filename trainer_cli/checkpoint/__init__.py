"""Saves and loads checkpoints: a state tree becomes a folder of files with a manifest, and the folder a tree again.

A save commits a complete checkpoint or nothing, and older checkpoints stay intact; a load returns what was saved, bit
for bit, or raises. Which checkpoints there are and what may go is decided elsewhere (`catalog`, `policy`).

    stage    a copy of the state, made at the end of a step; training continues
    write    its files in a hidden folder, each digested and fsynced
    gather   with several ranks: what every rank wrote, or why it could not
    commit   the manifest, last; then the folder is fsynced and renamed, and its parent fsynced

- A process that dies in between leaves a hidden folder, which no load looks at and the run's next start removes.
- One save is in flight at a time. A failure reaches its caller once, as a `SaveError` with what is left on the disk.
- Threads that write never communicate with other ranks: main threads gather, and rank 0 commits.
- With several ranks a checkpoint is committed only if the parts of all ranks make every tensor whole.

`Checkpointer` is the door. Begin with `save.py`, which has one save in four calls, then `checkpointer.py`;
`snapshot.py` copies the state, `group_save.py` saves by several ranks, `disk_errors.py` words what a full disk does.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.checkpoint.checkpointer import (
        Checkpointer as Checkpointer,
        make_sync_checkpointer as make_sync_checkpointer,
    )
    from trainer_cli.checkpoint.disk_errors import disk_error as disk_error
    from trainer_cli.checkpoint.disk_space import (
        FreeSpace as FreeSpace,
        NeededSpace as NeededSpace,
        files_of_checkpoint as files_of_checkpoint,
        find_shortage as find_shortage,
    )
    from trainer_cli.checkpoint.group_verify import GroupVerifier as GroupVerifier
    from trainer_cli.checkpoint.save import (
        CheckpointMetadata as CheckpointMetadata,
        InFlightSave as InFlightSave,
        SaveCaller as SaveCaller,
        SaveJob as SaveJob,
        errors_of_save as errors_of_save,
        library_versions as library_versions,
    )
    from trainer_cli.checkpoint.weights import read_evaluated_weights as read_evaluated_weights
    from trainer_cli.checkpoint.writer_thread import WriterThread as WriterThread

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "checkpointer": "Checkpointer make_sync_checkpointer",
            "disk_errors": "disk_error",
            "disk_space": "files_of_checkpoint find_shortage FreeSpace NeededSpace",
            "group_verify": "GroupVerifier",
            "save": "CheckpointMetadata errors_of_save InFlightSave library_versions SaveCaller SaveJob",
            "weights": "read_evaluated_weights",
            "writer_thread": "WriterThread",
        },
    )
