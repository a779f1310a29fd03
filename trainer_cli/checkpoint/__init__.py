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

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
