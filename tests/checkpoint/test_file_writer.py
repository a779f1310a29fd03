"""One file, however it was handed over and whatever the file system refuses: the same bytes, size and digest."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from mmap import mmap
from pathlib import Path
from random import Random

import pytest
from faulty_disk import FaultyDisk
from hypothesis import given, settings, strategies as st

from trainer_cli.manifest import FileEntry, new_digest
from trainer_cli.schema.checkpoint_config import DigestAlgorithm
from trainer_cli.storage import folder as folder_module
from trainer_cli.storage.disk import PAGE, Disk
from trainer_cli.storage.folder import StagedFolder

BLOCK = 4 * PAGE
CONTENT = Random(0).randbytes(40 * PAGE)


class SmallBlocks(Disk):
    """Blocks of a few pages, and a list of what was done to files."""

    block_bytes = BLOCK

    def __init__(self) -> None:
        self.done: list[str] = []
        self.direct = False

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        self.done.append(f"bypass {on}")
        super().bypass_cache(fd, on=on)
        self.direct = on

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.done.append(f"write {len(data)}")
        return super().write(fd, data, offset)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self.done.append(f"truncate {size_bytes}")
        super().truncate(fd, size_bytes)


class RefusesBypass(SmallBlocks):
    """Such as macOS without F_NOCACHE, and some network file systems."""

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        self.done.append("refused")
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class RefusesWrite(SmallBlocks):
    """Agrees to bypass the cache, then does not: some file systems in user space."""

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if self.direct:
            self.done.append("refused")
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().write(fd, data, offset)


class Greedy(SmallBlocks):
    """Takes fewer bytes than it could, in any number."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        few = self._random.choice([len(data), PAGE, 2 * PAGE, 512, 1, 777])
        if self.direct and few % PAGE:
            # The kernel stops there after a block that it could write; only whole ones can be asked for.
            self.bypass_cache(fd, on=False)
            self.direct = True
        return super().write(fd, data[:few], offset)


def pieces_of(content: bytes, cuts: list[int], *, aligned: bool) -> Iterator[memoryview]:
    """The content in pieces, from memory that begins at a page, or behind one."""
    memory = memoryview(mmap(-1, len(content) + 2 * PAGE))[0 if aligned else 64 :]
    memory[: len(content)] = content
    ends = sorted({cut % (len(content) + 1) for cut in cuts} | {len(content)})
    start = 0
    for end in ends:
        yield memory[start:end]
        start = end


def put(folder: StagedFolder, file: str, pieces: list[memoryview] | Iterator[memoryview]) -> FileEntry:
    with folder.create(file) as writer:
        for piece in pieces:
            writer.write(piece)
    return folder.files[file]


def folder_on(disk: Disk, path: Path, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128) -> StagedFolder:
    return StagedFolder(path, disk, digest)


def entry_of(content: bytes, algorithm: DigestAlgorithm = DigestAlgorithm.xxh3_128) -> FileEntry:
    digest = new_digest(algorithm)
    digest.update(content)
    return FileEntry(len(content), f"{algorithm.value}:{digest.hexdigest()}")


SIZES = [0, 1, *(whole + more for whole in (PAGE, BLOCK, 2 * BLOCK, 3 * BLOCK + PAGE) for more in (-1, 0, 1))]


@settings(deadline=None, max_examples=250)
@given(
    size=st.one_of(st.integers(0, len(CONTENT)), st.sampled_from(SIZES)),
    cuts=st.lists(st.one_of(st.integers(0, len(CONTENT)), st.integers(0, 9).map(lambda n: n * PAGE)), max_size=12),
    aligned=st.booleans(),
    make=st.sampled_from([SmallBlocks, RefusesBypass, RefusesWrite, *(partial(Greedy, seed) for seed in range(20))]),
    algorithm=st.sampled_from(DigestAlgorithm),
)
def test_pieces_of_any_size_and_place_make_the_same_file(
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    cuts: list[int],
    aligned: bool,
    make: Callable[[], Disk],
    algorithm: DigestAlgorithm,
) -> None:
    path = tmp_path_factory.mktemp("pieces")
    content = CONTENT[:size]
    entry = put(folder_on(make(), path, algorithm), "f", pieces_of(content, cuts, aligned=aligned))
    assert entry == entry_of(content, algorithm)
    assert (path / "f").read_bytes() == content


def test_a_large_file_goes_past_the_cache_in_whole_blocks_and_is_cut_to_its_size(tmp_path: Path) -> None:
    disk = SmallBlocks()
    content = CONTENT[: 2 * BLOCK + 5]
    put(folder_on(disk, tmp_path), "f", pieces_of(content, [7], aligned=True))
    assert disk.done == [
        "bypass True", f"write {BLOCK}", f"write {BLOCK}", f"write {PAGE}", f"truncate {len(content)}",
    ]  # fmt: skip


def test_memory_that_lies_as_the_file_does_is_written_from_where_it_is(tmp_path: Path) -> None:
    class Addresses(SmallBlocks):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            seen[offset] = data.obj is image
            return super().write(fd, data, offset)

    image = mmap(-1, 3 * BLOCK + PAGE)
    seen: dict[int, bool] = {}
    with folder_on(Addresses(), tmp_path).create("f") as writer:
        writer.write(memoryview(image))
        writer.write(CONTENT[:PAGE])
    assert seen == {0: True, 3 * BLOCK + PAGE: False}


def test_a_small_file_is_written_the_plain_way(tmp_path: Path) -> None:
    disk = SmallBlocks()
    put(folder_on(disk, tmp_path), "f", pieces_of(CONTENT[: BLOCK - 1], [100, 5000], aligned=True))
    assert disk.done == [f"write {BLOCK - 1}"]


@pytest.mark.parametrize("make", [RefusesBypass, RefusesWrite])
def test_a_file_system_is_not_asked_again_whether_its_cache_may_be_bypassed(
    tmp_path: Path, make: Callable[[], SmallBlocks], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    disk = make()
    folder = folder_on(disk, tmp_path)
    refused: list[int] = []
    for file in ("a", "b", "c"):
        put(folder, file, pieces_of(CONTENT, [9], aligned=True))
        assert (tmp_path / file).read_bytes() == CONTENT
        refused.append(disk.done.count("refused"))
    assert refused == [1, 1, 1]
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    assert caplog.text.count("through the page cache") == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_an_error_while_a_block_is_written_is_raised_and_the_file_is_not_listed(tmp_path: Path, number: int) -> None:
    counting = FaultyDisk(block_bytes=BLOCK)
    put(folder_on(counting, tmp_path), "counted", pieces_of(CONTENT, [9], aligned=False))
    for at, operation in enumerate(counting.operations, start=1):
        folder = folder_on(FaultyDisk(at, number=number, block_bytes=BLOCK), tmp_path)
        with pytest.raises(OSError, match=os.strerror(number)):
            put(folder, f"f{at}", pieces_of(CONTENT, [9], aligned=False))
        assert folder.files == {}, operation


def test_a_process_that_is_forked_meanwhile_holds_no_file_that_is_being_written(tmp_path: Path) -> None:
    def holds() -> bool:
        here, found = os.stat(tmp_path / "f"), False
        for fd in range(3, 1024):
            with suppress(OSError):
                found = found or os.path.samestat(os.fstat(fd), here)
        return found

    with folder_on(SmallBlocks(), tmp_path).create("f") as writer:
        writer.write(CONTENT[: 2 * BLOCK])
        child = os.fork()
        if child == 0:
            os._exit(int(holds()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert holds()


def test_a_disk_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    class Takes(SmallBlocks):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            return 0

    for size in (1, 3 * BLOCK):
        with pytest.raises(OSError, match="took no bytes"):
            put(folder_on(Takes(), tmp_path), f"f{size}", pieces_of(CONTENT[:size], [], aligned=True))


def test_what_the_caller_does_to_its_memory_afterwards_does_not_matter(tmp_path: Path) -> None:
    memory = memoryview(mmap(-1, 8 * BLOCK))
    digest = new_digest(DigestAlgorithm.xxh3_128)
    with folder_on(SmallBlocks(), tmp_path).create("f") as writer:
        for number, size in enumerate([3 * BLOCK, 7, 2 * BLOCK, PAGE, 5 * BLOCK + 3]):
            memory[:size] = bytes([number + 1]) * size
            digest.update(memory[:size])
            writer.write(memory[:size])
            memory[:size] = bytes(size)
    written = new_digest(DigestAlgorithm.xxh3_128)
    written.update((tmp_path / "f").read_bytes())
    assert written.hexdigest() == digest.hexdigest()


def test_a_large_piece_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "WRITE_BYTES", 3 * BLOCK)
    disk = SmallBlocks()
    put(folder_on(disk, tmp_path), "f", pieces_of(CONTENT[: 8 * BLOCK], [], aligned=True))
    assert disk.done == ["bypass True", f"write {3 * BLOCK}", f"write {3 * BLOCK}", f"write {2 * BLOCK}"]
