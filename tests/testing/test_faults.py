"""The injected disk fails in every operation of the real one."""

from __future__ import annotations

from faulty_disk import FaultyDisk

from trainer_cli.storage.disk import Disk

WITHOUT = {"close", "lock", "free_bytes", "free_files"}
"""Operations after which nothing on the disk is different."""


def test_every_operation_of_the_disk_can_fail() -> None:
    operations = {name for name, one in vars(Disk).items() if callable(one) and not name.startswith("_")}
    assert operations - set(vars(FaultyDisk)) == WITHOUT
