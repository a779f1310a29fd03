"""Hostile checkpoints run no code, write nothing, end in seconds and little memory, and give one line that names them.

`hostile_run` has a process read them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import Raw, build, call, dcp, named, opcodes, pickled, tensor, tensor_arguments, torch_zip
from hostile_run import CASES, read_cases, why_wrong

from trainer_cli.addons.formats.read import read_foreign
from trainer_cli.errors import CheckpointError


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What reading each case said; nothing else may happen."""
    return read_cases(tmp_path_factory.mktemp("hostile"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_checkpoint_is_refused_in_one_line(said: dict[str, dict[str, Any]], name: str) -> None:
    assert why_wrong(said[name]) is None


def test_attributes_that_a_file_gives_a_tensor_are_left_out(tmp_path: Path) -> None:
    hides = call(
        named("torch._tensor", "_rebuild_from_type_v2"),
        *(named("torch._utils", "_rebuild_tensor_v2"), named("torch", "Tensor"), tensor_arguments()),
        {"contiguous": 3, "to": 3},
    )
    torch_zip(tmp_path / "x.pt", pickled({"w": hides}))
    found = read_foreign(tmp_path / "x.pt").model["w"]
    assert torch.equal(found.to(torch.float64).contiguous(), torch.zeros(4, dtype=torch.float64))


def test_a_mapping_whose_methods_a_file_hides_is_read(tmp_path: Path) -> None:
    held = Raw(opcodes(call(named("collections", "OrderedDict"))) + b"(" + opcodes("w") + opcodes(tensor()) + b"u")
    torch_zip(tmp_path / "x.pt", pickled(build(held, {"get": 3, "items": 3, "keys": 3})))
    assert list(read_foreign(tmp_path / "x.pt").model) == ["w"]


def test_an_archive_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(4)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read_foreign(tmp_path / "x.pt").model["w"], torch.ones(4))


def test_metadata_cannot_change_the_classes_of_torch(tmp_path: Path) -> None:
    content = pickled(build(named("torch.distributed.checkpoint.metadata", "Metadata"), (None, {"planner_data": 7})))
    dcp(tmp_path / "dcp")
    (tmp_path / "dcp/.metadata").write_bytes(content)
    with pytest.raises(CheckpointError):
        read_foreign(tmp_path / "dcp")
    assert list(read_foreign(dcp(tmp_path / "again")).model) == ["w"]
