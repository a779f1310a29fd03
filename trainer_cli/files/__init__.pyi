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
