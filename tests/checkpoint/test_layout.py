"""The layout of a tensor file, known without torch, fits torch's own types."""

from __future__ import annotations

from trainer_cli.checkpoint.format.header import ELEMENT_BYTES
from trainer_cli.checkpoint.format.tensor_file import DTYPES


def test_every_type_of_element_has_the_size_that_torch_gives_it() -> None:
    assert {code: dtype.itemsize for code, dtype in DTYPES.items()} == ELEMENT_BYTES
