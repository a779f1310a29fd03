"""Where checkpoints are: whole folders that are written, read and removed, on a local disk or, by an add-on, elsewhere.

A `Storage` knows folders, their names and their bytes; only the manifest of a folder means anything to it.
`open_storage` selects one by the scheme of a path.

Invariants of `LocalStorage`, whichever operation the process dies in:

- A folder is a checkpoint if it has a plain name and a manifest. The manifest is written last and removed first.
- A save writes and fsyncs each file in a hidden folder, fsyncs that folder, renames it, and fsyncs its parent.
- A removal renames the manifest, fsyncs the folder, renames the folder, fsyncs its parent, and unlinks the files.
- A checkpoint that is read is not removed: readers hold a shared lock on the manifest.
- What an attempt of a run left half-written or half-removed has a hidden name with the run's id. The next attempt
  removes it (`Storage.sweep`), and no other program does. Damaged folders are renamed (`Storage.quarantine`).

It never reads a tensor and never decides what is kept. `Disk` does every access to the disk, so that a test can make
each one fail. Begin with `base.py` `Storage`, then `local.py`, `folder.py` (one folder) and `hidden_names.py`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
