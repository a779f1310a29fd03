"""A checkpoint that several machines save together in an object store, without a folder that all of them see.

    rank 0      claims the name ─────────────────────────────────────────> manifest, if none exists (committed)
    each rank   a file on its local disk, with its digest -> sent -> deleted here

Without the manifest no reader takes what was sent for a checkpoint. No object is replaced: what a process of an earlier
attempt still sends cannot change a checkpoint that was committed since.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from trainer_cli.addons.stores.object_client import ObjectClient
from trainer_cli.addons.stores.uploader import run_in_parallel
from trainer_cli.errors import UserError
from trainer_cli.layout import MANIFEST_FILE
from trainer_cli.schema import DigestAlgorithm
from trainer_cli.storage import Disk, LocalFileWriter, StagedFolder, delete_tree, removed_marker

logger = logging.getLogger(__name__)

WRITING_FILE = ".writing"
"""Object with the id of the run that is sending a checkpoint, until the commit. Other runs cannot send it meanwhile."""
FILES_AT_ONCE = 4


class RankFolder(StagedFolder):
    """The files of one rank. Each is sent when it is complete, so that only one at a time is on the local disk.

    Args:
        path: a local folder of this rank alone.
        name: of the checkpoint.

    Attributes:
        is_published: whether the manifest is in the store.
    """

    def __init__(self, path: Path, name: str, client: ObjectClient, disk: Disk, digest: DigestAlgorithm) -> None:
        super().__init__(path, disk, digest, self._put_manifest)
        self.name, self.client = name, client
        self.is_published = False
        self._manifest = b""

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
                self._manifest = (self.path / file).read_bytes()
            elif not self.client.upload_new(f"{self.name}/{file}", self.path / file):
                raise name_taken("another file of that name is in the store", f"{self.client.url}/{self.name}/{file}")
        finally:
            delete_tree(self._disk, self.path)

    def _put_manifest(self) -> None:
        if not self.client.put_new(f"{self.name}/{MANIFEST_FILE}", self._manifest):
            raise name_taken("another checkpoint of that name is in the store", f"{self.client.url}/{self.name}")
        self.is_published = True


@contextmanager
def claiming(folder: RankFolder, run_id: str) -> Iterator[RankFolder]:
    """Claim the name of a checkpoint for the ranks of a run; for rank 0 with its own folder.

    On exit all that the ranks have sent is deleted, unless the manifest was sent.

    Raises:
        FileExistsError: another run is sending a checkpoint of that name.
    """
    client, name = folder.client, folder.name
    # Before any other object: by it a later attempt of this run finds what was left.
    if not client.put_new(f"{name}/{WRITING_FILE}", run_id.encode()):
        raise name_taken("another run sends a checkpoint of that name", f"{client.url}/{name}")
    try:
        yield folder
    except GeneratorExit:
        # The save was never ended, as another rank was lost: a request could hang while the interpreter shuts down.
        raise
    except BaseException:
        _unclaim(folder, run_id)
        raise
    _unclaim(folder, run_id)


def _unclaim(folder: RankFolder, run_id: str) -> None:
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
    files = [file for file in client.list(name) if not file.startswith(".")]
    run_in_parallel([partial(client.delete, f"{name}/{file}") for file in files], FILES_AT_ONCE)
    # The markers last: by them a later attempt of this run finds a folder that was deleted in part.
    for marker in (WRITING_FILE, removed_marker(run_id)):
        client.delete(f"{name}/{marker}")


def name_taken(message: str, where: str) -> FileExistsError:
    """The error of an object or a checkpoint that exists, and must not be replaced."""
    return FileExistsError(errno.EEXIST, message, where)
