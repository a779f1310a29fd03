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

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.files.durable import (
        REFUSED as REFUSED,
        AppendedFile as AppendedFile,
        FileIdentity as FileIdentity,
        close_private as close_private,
        is_gone as is_gone,
        keep_spans as keep_spans,
        locked_file as locked_file,
        naming as naming,
        open_private as open_private,
        private_file as private_file,
        replace as replace,
        staged_path as staged_path,
        sync as sync,
    )
    from trainer_cli.files.json_lines import (
        GrowingFile as GrowingFile,
        parse_object as parse_object,
        parse_rows as parse_rows,
        read_last_row as read_last_row,
        read_rows as read_rows,
    )
    from trainer_cli.files.url_path import as_path as as_path, is_url as is_url

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "durable": (
                "AppendedFile close_private FileIdentity is_gone keep_spans locked_file naming open_private "
                "private_file REFUSED replace staged_path sync"
            ),
            "json_lines": "GrowingFile parse_object parse_rows read_last_row read_rows",
            "url_path": "as_path is_url",
        },
    )
