"""Which part of which tensor each file of a checkpoint has, for thousands of files and tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from trainer_cli.layout.shards import Shard

Groups = Mapping[Shard, tuple[str, ...]]
"""A part -> the names of the tensors of which a file has this part."""


def _group_names(parts: Mapping[str, Shard]) -> Groups:
    """Group the tensors of a file by their parts."""
    groups: dict[Shard, list[str]] = {}
    for name, shard in parts.items():
        groups.setdefault(shard, []).append(name)
    return {shard: tuple(names) for shard, names in groups.items()}


class PartTable(Mapping[str, Mapping[str, Shard]]):
    """File -> name of a tensor -> the part of it in the file.

    Tensors of one shape that are divided alike have equal parts in each file. Their names are stored once for all
    files, so that the table of N ranks with M tensors grows with N + M. The names and parts of a file are put together
    when they are asked for.

    Attributes:
        groups: file -> part -> the names of the tensors of which the file has this part.
    """

    def __init__(self, groups: Mapping[str, Groups]) -> None:
        # Equal groups of names become one tuple.
        shared: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.groups = {
            file: {shard: shared.setdefault(names, names) for shard, names in file_groups.items()}
            for file, file_groups in groups.items()
        }

    @classmethod
    def of(cls, table: Mapping[str, Mapping[str, Shard]]) -> PartTable:
        """The table with these parts."""
        return table if isinstance(table, cls) else cls({file: _group_names(parts) for file, parts in table.items()})

    @classmethod
    def joined(cls, tables: Iterable[PartTable]) -> PartTable:
        """One table with the files of these tables."""
        return cls({file: groups for table in tables for file, groups in table.groups.items()})

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PartTable:
        """Read what `to_json` writes.

        Raises:
            ValueError: it is not that.
        """
        names: list[tuple[str, ...]] = []
        for group in raw["names"]:
            if not isinstance(group, list) or not group or not all(isinstance(name, str) for name in group):
                raise ValueError("a group of names is not a list of names")
            names.append(tuple(group))
        # The lists of groups that are known to name no tensor twice.
        disjoint: set[tuple[int, ...]] = set()
        groups: dict[str, Groups] = {}
        for file, file_groups in raw["files"].items():
            numbers = tuple(file_groups.values())
            if not all(type(number) is int and 0 <= number < len(names) for number in numbers):
                raise ValueError(f"{file[:80]!r} has a part of an unknown group of names")
            # Checked once for all files with the same groups.
            if numbers not in disjoint:
                listed = [name for number in numbers for name in names[number]]
                if len(set(listed)) != len(listed):
                    raise ValueError(f"{file[:80]!r} has two parts of one tensor")
                disjoint.add(numbers)
            groups[file] = {Shard.parse(text): names[number] for text, number in file_groups.items()}
        return cls(groups)

    def to_json(self) -> dict[str, Any]:
        """The table for JSON: groups of names, and file -> part -> the number of a group."""
        numbers: dict[tuple[str, ...], int] = {}
        files: dict[str, dict[str, int]] = {}
        # Sorted as in the JSON text, so that a table that was read has the same numbers.
        for file in sorted(self.groups):
            file_groups = sorted((str(shard), names) for shard, names in self.groups[file].items())
            files[file] = {text: numbers.setdefault(names, len(numbers)) for text, names in file_groups}
        return {"files": files, "names": [list(names) for names in numbers]}

    def __getitem__(self, file: str) -> Mapping[str, Shard]:
        return {name: shard for shard, names in self.groups[file].items() for name in names}

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def renamed(self, files: Mapping[str, str]) -> PartTable:
        """The table of these files alone, under other names."""
        return PartTable({new: self.groups[file] for file, new in files.items() if file in self.groups})

    def by_name(self) -> dict[str, Mapping[str, Shard]]:
        """Name of a tensor -> file -> the part of it in the file. Tensors with equal parts have one dictionary."""
        parts_of_group: dict[int, dict[str, Shard]] = {}
        names_of_group: dict[int, tuple[str, ...]] = {}
        for file, groups in self.groups.items():
            for shard, names in groups.items():
                # The key is the identity: equal groups are one tuple, and the hash of a tuple reads all its names.
                parts_of_group.setdefault(id(names), {})[file] = shard
                names_of_group[id(names)] = names
        groups_of_name: dict[str, tuple[int, ...]] = {}
        for group, names in names_of_group.items():
            for name in names:
                groups_of_name[name] = (*groups_of_name.get(name, ()), group)
        # A tensor that is too short for all ranks is in several groups: on some ranks others of its group are alone.
        merged: dict[tuple[int, ...], dict[str, Shard]] = {}
        for groups_key in set(groups_of_name.values()):
            merged[groups_key] = {}
            for group in groups_key:
                merged[groups_key] |= parts_of_group[group]
        return {name: merged[groups_key] for name, groups_key in groups_of_name.items()}

    def why_uncovered(self, names: Collection[str], aliases: Mapping[str, str]) -> str | None:
        """The reason why the files of all ranks do not contain every tensor of a state completely; None if they do.

        Args:
            names: the names of the state's tensors.
            aliases: name of a tied tensor -> the name under which it is stored.
        """
        parts = self.by_name()
        for name in names:
            if aliases.get(name, name) not in parts:
                return f"no rank has written {name}"
        # Checked once for all tensors with equal parts.
        problems: dict[int, str | None] = {}
        for name, shards in parts.items():
            if id(shards) not in problems:
                problems[id(shards)] = Shard.why_incomplete(shards.values())
            if problem := problems[id(shards)]:
                return f"{name}: {problem}"
        return None
