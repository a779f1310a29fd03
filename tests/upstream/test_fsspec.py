"""fsspec: files of object stores."""

from __future__ import annotations

from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class Store(AbstractFileSystem):
    """An object store that keeps which uploads were completed."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.completed: dict[str, bytes] = {}

    def _open(self, path: str, mode: str = "rb", **settings: Any) -> Upload:
        return Upload(self, path, mode)


class Upload(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.parts = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts += self.buffer.getvalue()
        if final:
            self.fs.completed[self.path] = self.parts
        return True


def test_a_file_whose_writer_fails_is_not_completed() -> None:
    """The `with` block closes the file after an exception, too, and closing completes the upload: a part of a
    checkpoint stands under its final name. `addons/stores/object_client.py` uploads finished files."""
    store = Store()
    try:
        with store.open("checkpoint", "wb") as file:
            file.write(b"the first half")
            raise OSError("the disk with the second half")
    except OSError:
        pass
    assert store.completed == {}
