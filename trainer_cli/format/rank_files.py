"""The names of the files that a rank writes in the default format."""

from __future__ import annotations

from trainer_cli.manifest import FROZEN_SUFFIX, Manifest


class FilesOfRank:
    """The names of one rank's files."""

    def __init__(self, rank: int) -> None:
        self.tensors = f"rank{rank}.safetensors"
        self.frozen = f"rank{rank}{FROZEN_SUFFIX}"
        """Tensors of the state that are not trained, if they are large; other tensors are in `tensors`."""
        self.state = f"rank{rank}.json"
        """The small states; of rank 0 those that all ranks share."""
        self.own = f"rank{rank}.own.json"
        """The states that a rank of a distributed run saves for itself."""

    @property
    def with_tensors(self) -> tuple[str, str]:
        """The tensor files, of which the second may be missing."""
        return self.tensors, self.frozen


def tensor_files(manifest: Manifest, rank: int) -> list[str]:
    """The tensor files of a rank; that of the trained tensors is listed also if the manifest lacks it."""
    files = FilesOfRank(rank)
    return [file for file in files.with_tensors if file == files.tensors or file in manifest.files]
