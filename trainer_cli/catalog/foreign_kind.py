"""Recognise checkpoints of other programs by their content, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from trainer_cli.errors import UserError
from trainer_cli.layout import MANIFEST_FILE

_MAX_HEADER_BYTES = 100_000_000
_PICKLE_MARKS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class ForeignKind(StrEnum):
    """How a checkpoint of another program is stored."""

    torch_file = "torch file"
    safetensors = "safetensors file"
    huggingface = "Hugging Face folder"
    dcp = "DCP folder"
    torch_checkpointer = "folder of torch's Checkpointer"

    @property
    def marks(self) -> tuple[str, ...]:
        """The files by one of which a folder of this kind is recognised."""
        return _MARKS.get(self, ())

    @classmethod
    def of(cls, path: Path) -> ForeignKind | None:
        """How the checkpoint of another program at `path` is stored; None if it is our own, or not a checkpoint."""
        if path.is_dir():
            return _recognise_folder(path)
        try:
            # Opening a pipe would wait for its writer.
            if not path.is_file():
                return None
            with path.open("rb") as file:
                # As far as the mark of a tar archive, at byte 257.
                begin = file.read(512)
        except OSError:
            return None
        # Torch wrote a pickle or a tar archive before version 1.6, and a zip archive since.
        if begin.startswith((b"PK\x03\x04", *_PICKLE_MARKS)) or begin[257:262] == b"ustar":
            return ForeignKind.torch_file
        # A safetensors file begins with the size of its header, which is JSON.
        header_bytes = int.from_bytes(begin[:8], "little")
        has_header = 2 <= header_bytes <= _MAX_HEADER_BYTES and begin[8:9] == b"{"
        return ForeignKind.safetensors if has_header else None


_MARKS = {
    ForeignKind.dcp: (".metadata",),
    # What rank 0 writes by torch.distributed.checkpoint's experimental Checkpointer; rank 1 writes checkpoint_1.pt.
    ForeignKind.torch_checkpointer: ("checkpoint_0.pt",),
    ForeignKind.huggingface: (
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
        "model.safetensors",
        "pytorch_model.bin",
    ),
}


def refuse_foreign(path: Path, states: Sequence[str]) -> None:
    """Refuse to load more than the weights of another program's checkpoint.

    Raises:
        UserError: `states` has other entries than `model`.
    """
    if list(states) != ["model"] and (kind := ForeignKind.of(path)) is not None:
        raise UserError(
            f"{path} is a {kind}, from which only the weights can be loaded",
            where="load.states",
            cure="Write load.states=[model]; in Python, LoadOptions(states=['model']).",
        )


def _recognise_folder(path: Path) -> ForeignKind | None:
    """How the checkpoint of another program in a folder is stored, or None."""
    # This is asked first: the huggingface format has a manifest beside a model.safetensors.
    if (path / MANIFEST_FILE).is_file():
        return None
    return next((kind for kind, marks in _MARKS.items() if any((path / name).is_file() for name in marks)), None)
