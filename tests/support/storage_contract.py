"""The promises of the Storage port, which every storage keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
from small_parts import present

from trainer_cli.manifest import FileEntry, Manifest, new_digest
from trainer_cli.policy import CheckpointKind
from trainer_cli.schema.checkpoint_config import DigestAlgorithm
from trainer_cli.storage.base import Storage
from trainer_cli.storage.folder import StagedFolder


def manifest_of(files: Mapping[str, FileEntry], loss: float = 0.0) -> bytes:
    return Manifest(
        run_id="run1", attempt=3, step=1, epoch=0, kind=CheckpointKind.regular, reason="a test",
        metrics={"loss": loss}, files=files,
    ).to_bytes()  # fmt: skip


def put(storage: Storage, name: str, **files: bytes) -> None:
    with storage.writing(name) as folder:
        for file, content in files.items():
            with folder.create(file) as writer:
                writer.write(content)
        publish(folder)


def publish(folder: StagedFolder) -> None:
    content = manifest_of(folder.files)
    with folder.create("manifest.json") as writer:
        writer.write(content)
    folder.publish()


def amended(storage: Storage, name: str, loss: float) -> bytes:
    """The manifest after an evaluation."""
    return manifest_of(Manifest.parse(storage.peek(name, "manifest.json") or b"").files, loss)


class StorageContract:
    """What a fixture `storage`, empty at first, must do."""

    def test_an_empty_storage_has_no_names(self, storage: Storage) -> None:
        assert storage.names() == []
        assert storage.sweep() == []
        assert (free_bytes := storage.free_bytes()) is None or free_bytes > 0
        assert storage.removed_bytes() == 0

    def test_a_written_folder_is_there_with_its_files(self, storage: Storage) -> None:
        put(storage, "step1", a=b"alpha", b=b"")
        assert storage.names() == ["step1"]
        manifest = present(storage.peek("step1", "manifest.json"))
        assert storage.sizes("step1") == {"a": 5, "b": 0, "manifest.json": len(manifest)}
        assert storage.peek("step1", "a") == b"alpha"
        with storage.reading("step1") as folder, folder.open("a") as source:
            assert source.size_bytes == 5
            content = bytearray(5)
            source.read_at([memoryview(content)[2:]], 2)
            source.read_at([memoryview(content)[:1], memoryview(content)[1:2]], 0)
            assert content == b"alpha"

    def test_a_folder_is_visible_once_it_is_published_and_gone_where_it_never_is(self, storage: Storage) -> None:
        for publishes in (False, True):
            with storage.writing("step1") as folder:
                with folder.create("manifest.json") as writer:
                    writer.write(manifest_of({}))
                assert storage.names() == []
                assert storage.peek("step1", "manifest.json") is None
                if publishes:
                    folder.publish()
            assert storage.names() == (["step1"] if publishes else [])
            assert storage.sweep() == []

    @pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
    def test_an_error_while_writing_leaves_nothing(self, storage: Storage, error: type[BaseException]) -> None:
        def write_half() -> None:
            with storage.writing("step1") as folder, folder.create("a") as writer:
                writer.write(b"half")
                raise error

        with pytest.raises(error):
            write_half()
        assert storage.names() == []
        assert storage.sweep() == []
        put(storage, "step1", a=b"whole")
        assert storage.peek("step1", "a") == b"whole"

    @pytest.mark.parametrize("algorithm", list(DigestAlgorithm))
    def test_size_and_digest_are_those_of_all_that_was_written(
        self, storage: Storage, algorithm: DigestAlgorithm
    ) -> None:
        pieces = [os.urandom(size) for size in (1, 0, 70_000, 3, 9_000_000, 65_536, 5)]
        with storage.writing("step1", digest=algorithm) as folder:
            with folder.create("a") as writer:
                for piece in pieces:
                    writer.write(memoryview(piece))
            entry = folder.files["a"]
            publish(folder)
        digest = new_digest(algorithm)
        digest.update(b"".join(pieces))
        assert (entry.size_bytes, entry.digest) == (sum(map(len, pieces)), f"{algorithm.value}:{digest.hexdigest()}")
        assert storage.peek("step1", "a") == b"".join(pieces)

    def test_a_file_that_failed_is_not_listed(self, storage: Storage) -> None:
        with storage.writing("step1") as folder:
            with pytest.raises(ValueError, match="x"), folder.create("a"):
                raise ValueError("x")
            assert folder.files == {}

    def test_a_folder_with_a_manifest_is_never_replaced(self, storage: Storage) -> None:
        put(storage, "step1", a=b"first")
        with pytest.raises(FileExistsError):
            put(storage, "step1", a=b"second")
        assert storage.peek("step1", "a") == b"first"

    def test_what_is_not_there_is_reported_so(self, storage: Storage) -> None:
        assert storage.peek("step1", "a") is None
        assert storage.sizes("step1") == {}
        assert not storage.is_pinned("step1")
        assert not storage.remove("step1")
        with pytest.raises(FileNotFoundError), storage.reading("step1"):
            pass
        put(storage, "step1")
        assert storage.peek("step1", "a") is None
        with storage.reading("step1") as folder, pytest.raises(FileNotFoundError), folder.open("a"):
            pass

    def test_reading_past_the_end_is_an_error(self, storage: Storage) -> None:
        put(storage, "step1", a=b"alpha")
        with storage.reading("step1") as folder, folder.open("a") as source, pytest.raises(OSError, match="shorter"):
            source.read_at([memoryview(bytearray(6))], 0)

    def test_a_removed_folder_is_gone_and_can_be_written_again(self, storage: Storage) -> None:
        put(storage, "step1", a=b"first")
        put(storage, "step2", a=b"other")
        assert storage.remove("step1")
        assert storage.names() == ["step2"]
        put(storage, "step1", a=b"second")
        assert storage.peek("step1", "a") == b"second"

    def test_a_folder_that_is_read_is_not_removed(self, storage: Storage) -> None:
        put(storage, "step1", a=b"alpha")
        with storage.reading("step1"), storage.reading("step1"):
            assert not storage.remove("step1")
            assert storage.peek("step1", "a") == b"alpha"
        assert storage.remove("step1")

    def test_an_amended_manifest_takes_the_place_of_the_old_one(self, storage: Storage) -> None:
        put(storage, "step1", a=b"a")
        storage.amend("step1", amended(storage, "step1", 1.0))
        newer = amended(storage, "step1", 2.0)
        storage.amend("step1", newer)
        assert storage.peek("step1", "manifest.json") == newer
        assert set(storage.sizes("step1")) == {"a", "manifest.json"}

    def test_a_reader_keeps_its_files_though_the_manifest_is_replaced_meanwhile(self, storage: Storage) -> None:
        put(storage, "step1", a=b"alpha")
        with storage.reading("step1") as folder:
            storage.amend("step1", amended(storage, "step1", 1.0))
            newer = amended(storage, "step1", 2.0)
            storage.amend("step1", newer)
            assert not storage.remove("step1")
            with folder.open("a") as source:
                assert source.size_bytes == 5
            with storage.reading("step1"):
                assert storage.peek("step1", "manifest.json") == newer
        assert storage.remove("step1")
        assert storage.names() == []

    def test_what_is_not_there_cannot_be_amended(self, storage: Storage) -> None:
        with pytest.raises(FileNotFoundError):
            storage.amend("step1", b"new")

    def test_a_pin_is_set_and_taken_back(self, storage: Storage) -> None:
        put(storage, "step1", a=b"a")
        for pinned in (True, True, False, False):
            storage.pin("step1", pinned=pinned)
            assert storage.is_pinned("step1") is pinned

    def test_what_has_no_manifest_is_cleared_away_and_nothing_else(self, storage: Storage) -> None:
        put(storage, "step1", a=b"a")
        assert not storage.clear("step1")
        assert not storage.clear("step2")
        storage.remove("step1")
        put(storage, "step3", a=b"a")
        assert storage.names() == ["step3"]

    def test_a_folder_set_aside_is_out_of_the_way(self, storage: Storage) -> None:
        put(storage, "step1", a=b"bad")
        storage.quarantine("step1", "a test")
        assert storage.names() == []
        put(storage, "step1", a=b"good")
        storage.quarantine("step1", "a test again")
        put(storage, "step1", a=b"better")
        assert storage.peek("step1", "a") == b"better"

    @pytest.mark.parametrize("name", ["", ".", "..", "../step1", "a/b", "/tmp/x", ".hidden", "a\0b"])
    def test_names_that_lead_elsewhere_are_refused(self, storage: Storage, name: str) -> None:
        for act in (
            lambda: storage.writing(name).__enter__(),
            lambda: storage.reading(name).__enter__(),
            lambda: storage.remove(name),
            lambda: storage.sizes(name),
            lambda: storage.peek(name, "a"),
            lambda: storage.quarantine(name, ""),
            lambda: storage.is_pinned(name),
        ):
            with pytest.raises(ValueError, match="plain name"):
                act()
        put(storage, "step1")
        with pytest.raises(ValueError, match="plain name"):
            storage.peek("step1", name)
        with storage.writing("step2") as folder, pytest.raises(ValueError, match="plain name"):
            folder.create(name).__enter__()
