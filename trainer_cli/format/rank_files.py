"""The names of the files that a rank writes in the default format."""

from __future__ import annotations


class FilesOfRank:
    """The names of one rank's files."""

    def __init__(self, rank: int) -> None:
        self.tensors = f"rank{rank}.safetensors"
        self.state = f"rank{rank}.json"
        """The small states; of rank 0 those that all ranks share."""
        self.own = f"rank{rank}.own.json"
        """The states that a rank of a distributed run saves for itself."""
