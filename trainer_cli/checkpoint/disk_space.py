"""Whether a file system has room for a save, and for what a training has on the disk at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer_cli.terminal import format_count

BLOCK_BYTES = 4096
"""The unit in which most file systems give space to files: each file takes up to one more than its size."""
_MOST_SPARE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """What a file system has left."""

    size_bytes: int | None = None
    """None: unknown."""
    files: int | None = None
    """None: unknown, or unlimited."""


@dataclass(frozen=True, slots=True)
class NeededSpace:
    """What one checkpoint or several take."""

    size_bytes: int
    files: int

    def times(self, count: int) -> NeededSpace:
        """The space for several checkpoints of this size."""
        return NeededSpace(self.size_bytes * count, self.files * count)

    @property
    def with_logs(self) -> int:
        """The size in bytes, with unused ends of blocks, and a tenth more (at most 16 MiB) for the logs."""
        return self.size_bytes + self.files * BLOCK_BYTES + min(self.size_bytes // 10, _MOST_SPARE_BYTES)


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a training lacks on the disk."""

    text: str
    refuses: bool
    """Whether not even two saves fit. Otherwise the disk fills up later."""


def files_of_checkpoint(world_size: int, other_files: int) -> int:
    """Number of files of a checkpoint, with its folder: tensors and state of each rank, the manifest, `other_files`."""
    return 2 * world_size + other_files + 2


def why_no_room(needed: NeededSpace, free: FreeSpace) -> str | None:
    """What is needed and what is free; None if it fits, or if that is unknown."""
    if free.files is not None and needed.files > free.files:
        files = format_count(needed.files, "file")
        return f"it needs {files}, and the file system can hold {free.files:,} more (free inodes)"
    if free.size_bytes is not None and needed.with_logs > free.size_bytes:
        return (
            f"it needs {format_count(needed.size_bytes, 'byte')} and {needed.with_logs - needed.size_bytes:,} "
            f"for blocks and logs, {format_count(free.size_bytes, 'byte')} are free"
        )
    return None


def find_shortage(save: NeededSpace, peak: NeededSpace, free: FreeSpace, shared_bytes: int = 0) -> Shortage | None:
    """The space that the saves of a training lack; None if they fit, as far as that is known.

    Args:
        save: the space of one checkpoint.
        peak: the most space that its checkpoints take at a time, beyond what is on the disk now.
        shared_bytes: size of a file that the second checkpoint does not take again.
    """
    # An old checkpoint is removed once the next is committed, so two exist at a time, unless only one is saved.
    two = replace(save.times(2), size_bytes=2 * save.size_bytes - shared_bytes)
    first_saves = two if two.size_bytes < peak.size_bytes else peak
    if (why := why_no_room(first_saves, free)) is not None:
        return Shortage(f"the disk has no room for the first saves: {why}", refuses=True)
    if (why := why_no_room(peak, free)) is not None:
        return Shortage(f"the disk will be full before the run ends: {why}", refuses=False)
    return None
