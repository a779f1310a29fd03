from trainer_cli.storage.base import (
    FileWriter as FileWriter,
    ReadableFolder as ReadableFolder,
    Storage as Storage,
    UnsyncedError as UnsyncedError,
    WritableFolder as WritableFolder,
)
from trainer_cli.storage.copying import write_copy as write_copy
from trainer_cli.storage.disk import Bytes as Bytes, Disk as Disk, delete_tree as delete_tree
from trainer_cli.storage.downloads import DOWNLOADS as DOWNLOADS
from trainer_cli.storage.folder import (
    LocalFileWriter as LocalFileWriter,
    LocalReadableFolder as LocalReadableFolder,
    StagedFolder as StagedFolder,
    point_latest_link as point_latest_link,
    replacing as replacing,
)
from trainer_cli.storage.hidden_names import (
    REMOVED_PREFIX as REMOVED_PREFIX,
    Hidden as Hidden,
    HiddenName as HiddenName,
)
from trainer_cli.storage.local import LocalStorage as LocalStorage
from trainer_cli.storage.open import open_storage as open_storage
