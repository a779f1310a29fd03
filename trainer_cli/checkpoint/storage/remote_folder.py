"""One checkpoint while it is sent to an object store, by one process or by the ranks of several machines.

    claim of the name ─> files, each when it is complete ─> manifest, if none exists (committed) ─> claim deleted

Without the manifest no reader takes what was sent for a checkpoint. No object is replaced: what a process of an earlier
attempt still sends cannot change a checkpoint that was committed since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from trainer_cli.checkpoint.storage.disk import Disk, delete_tree
from trainer_cli.checkpoint.storage.folder import LocalFileWriter, StagedFolder
from trainer_cli.checkpoint.storage.object_client import ObjectClient
from trainer_cli.core.checkpoint_config import DigestAlgorithm
from trainer_cli.core.naming import MANIFEST_FILE, removed_marker
from trainer_cli.errors import UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")

WRITING_FILE = ".writing"
"""Object with the id of the run that is sending a checkpoint, until the commit. Other runs cannot send it meanwhile."""
_FILES_AT_ONCE = 4


class RemoteFolder(StagedFolder):
    """A checkpoint that is being sent. A file that `create` makes is on the local disk only until it is sent.

    Args:
        path: a local folder of this process alone, for the file that is being written.
        name: of the checkpoint.

    Attributes:
        manifest: sent by `publish`.
        is_published: whether the manifest is in the store.
    """

    def __init__(self, path: Path, name: str, client: ObjectClient, disk: Disk, digest: DigestAlgorithm) -> None:
        super().__init__(path, disk, digest, self._put_manifest)
        self.name, self.client = name, client
        self.manifest = b""
        self.is_published = False

    @property
    def hidden_name(self) -> str:
        return self.name

    @contextmanager
    def create(self, file: str) -> Iterator[LocalFileWriter]:
        """A new file; on clean exit it is in `files` and in the store. The manifest waits for `publish`."""
        # A process that was killed may have left its last file.
        delete_tree(self._disk, self.path)
        self._disk.mkdir(self.path)
        try:
            with super().create(file) as writer:
                yield writer
            if file == MANIFEST_FILE:
                self.manifest = (self.path / file).read_bytes()
            else:
                self.send(file, self.path / file)
        finally:
            delete_tree(self._disk, self.path)

    def send(self, file: str, path: Path) -> None:
        """Send a complete file.

        Raises:
            FileExistsError: the store has another file of that name.
        """
        if not self.client.upload_new(f"{self.name}/{file}", path):
            raise FileExistsError(f"another file of that name is in the store: {self.name}/{file}")

    def claim(self, run_id: str) -> None:
        """Claim the name of the checkpoint for a run, before any other object: by the claim a later attempt of this run
        finds what was left.

        Raises:
            FileExistsError: another run is sending a checkpoint of that name.
        """
        if not self.client.put_new(f"{self.name}/{WRITING_FILE}", run_id.encode()):
            raise FileExistsError(f"another run sends a checkpoint of that name: {self.name}")

    def _put_manifest(self) -> None:
        if not self.client.put_new(f"{self.name}/{MANIFEST_FILE}", self.manifest):
            raise FileExistsError(f"another checkpoint of that name is in the store: {self.name}")
        self.is_published = True


@contextmanager
def claiming(folder: RemoteFolder, run_id: str) -> Iterator[RemoteFolder]:
    """Claim the name of a checkpoint for the ranks of a run; for rank 0 with its own folder.

    On exit all that the ranks have sent is deleted, unless the manifest was sent.

    Raises:
        FileExistsError: see `RemoteFolder.claim`.
    """
    folder.claim(run_id)
    try:
        yield folder
    except GeneratorExit:
        # The save was never ended, as another rank was lost: a request could hang while the interpreter shuts down.
        raise
    except BaseException:
        _unclaim(folder, run_id)
        raise
    _unclaim(folder, run_id)


def _unclaim(folder: RemoteFolder, run_id: str) -> None:
    client, name = folder.client, folder.name
    try:
        # The manifest may be there although the reply to its write was lost: then all files are there, too.
        if folder.is_published or client.get(f"{name}/{MANIFEST_FILE}") is not None:
            client.delete(f"{name}/{WRITING_FILE}")
        else:
            delete_objects(client, name, run_id)
    except (OSError, UserError) as error:
        logger.debug("%s/%s is cleared by a later attempt: %s", client.url, name, error)


def is_left_by(run_id: str, client: ObjectClient, name: str, files: Collection[str]) -> bool:
    """Whether an attempt of a run left these files of a folder half-sent or half-removed."""
    if removed_marker(run_id) in files:
        return True
    return WRITING_FILE in files and client.get(f"{name}/{WRITING_FILE}") == run_id.encode()


def delete_objects(client: ObjectClient, name: str, run_id: str) -> None:
    """Delete the objects of a folder without a manifest."""
    call_in_parallel(client.delete, [f"{name}/{file}" for file in client.list(name) if not file.startswith(".")])
    # The markers last: by them a later attempt of this run finds a folder that was deleted in part.
    for marker in (WRITING_FILE, removed_marker(run_id)):
        client.delete(f"{name}/{marker}")


def call_in_parallel(function: Callable[[T], object], arguments: Iterable[T]) -> None:
    """Call a function with each argument, in a few threads. Raises the first exception once the calls that began have
    ended."""
    with ThreadPoolExecutor(_FILES_AT_ONCE, "checkpoint-transfer") as pool:
        for _ in pool.map(function, arguments):
            pass
