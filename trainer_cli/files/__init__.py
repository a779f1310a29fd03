"""Files that survive a crash, and the paths that name them. It knows neither runs nor checkpoints.

A file is either replaced as a whole (`replace`: written beside, fsynced, renamed, its folder fsynced), or it grows by
whole records (`AppendedFile`), which readers in other processes follow (`GrowingFile`). A crash leaves the old or the
new content, and at most the last record incomplete. Every OSError names its file.

Locks belong to open files: those that `private_file` and `open_private` open are closed in forked children, so that a
data worker never keeps the lock of a process that was killed. Where a file system has no fsync for files, that is
reported once, and no obstacle.

A path may be the URL of an object store (`as_path`). Such a path can be joined and split, and nothing can be opened by
it: the storage of its scheme reads it.

Begin with `durable.py` `replace`; `json_lines.py` reads, `url_path.py` names.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
