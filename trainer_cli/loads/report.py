"""What was loaded from a checkpoint and what was not, and what to do about weights that do not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer_cli.patterns import matches
from trainer_cli.terminal import format_count

_MAX_LISTED = 12
"""Lines of `list_by_owner`."""
OTHER_MODEL = "The model must have the layers and shapes that the checkpoint was saved with."


@dataclass(slots=True)
class LoadReport:
    """What was loaded from a checkpoint and what was not, by the names of the model."""

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """In the model, but not in the checkpoint."""
    unexpected: list[str] = field(default_factory=list)
    """In the checkpoint, but not in the model."""
    ignored: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    """Of another shape in the checkpoint; refused, strict or not."""
    cast: dict[str, str] = field(default_factory=dict)
    """Name -> the element types in the checkpoint and in the model, where these differ."""

    @property
    def one_sided(self) -> list[str]:
        """A line for each tensor that only the model or only the checkpoint has."""
        rows = [f"{name}: missing in the checkpoint" for name in self.missing]
        return rows + [f"{name}: not in this model" for name in self.unexpected]

    @property
    def lines(self) -> list[str]:
        """A line for each tensor that was not loaded, or not as it was saved."""
        rows = [*self.one_sided, *(f"{name}: ignored" for name in self.ignored)]
        count = Counter(self.cast.values())
        return rows + [f"{format_count(number, 'tensor')}: cast from {how}" for how, number in count.items()]

    @property
    def globs_of_reshaped(self) -> list[str]:
        """The `ignore_keys` for tensors of another shape: a glob of the whole layer, or the tensor alone if the layer
        contains further layers, which the glob would ignore too."""
        names = [*self.loaded, *self.missing, *self.unexpected]
        globs = set()
        for name in self.reshaped:
            layer = name.rpartition(".")[0]
            names_in_layer = [other.removeprefix(f"{layer}.") for other in names if other.startswith(f"{layer}.")]
            has_sublayers = any("." in name_in_layer for name_in_layer in names_in_layer)
            globs.add(f"{layer}.*" if layer and not has_sublayers else name)
        return sorted(globs)

    @property
    def needs_not_strict(self) -> bool:
        """Whether only one side has tensors that `globs_of_reshaped` does not ignore."""
        globs = self.globs_of_reshaped
        ignored = [name for name in (*self.missing, *self.unexpected) if any(matches(name, glob) for glob in globs)]
        return len(ignored) < len(self.missing) + len(self.unexpected)

    def __str__(self) -> str:
        """How many tensors were loaded, and what happened to the others."""
        total = len(self.loaded) + len(self.missing) + len(self.ignored)
        count = format_count(total, "tensor")
        return f"{len(self.loaded):,} of {count}" if self.missing or self.ignored else count

    @property
    def advice(self) -> str:
        """The cure for weights that do not fit."""
        if self.reshaped and len(self.one_sided) > len(self.loaded) + len(self.reshaped):
            # Few layers are in both: it is another model, of which hardly anything would be loaded.
            return OTHER_MODEL
        if self.reshaped:
            globs = ",".join(self.globs_of_reshaped)
            more = " load.strict=false" if self.needs_not_strict else ""
            return f"To keep the model's own values of these layers, add 'load.ignore_keys=[{globs}]'{more}."
        if (mapping := self.prefix_mapping) is not None:
            ((old, new),) = mapping.items()
            return f"The names differ by a prefix: add 'load.key_mapping={{{old}: {new}}}'."
        if self.one_sided:
            return f"{OTHER_MODEL} load.strict=false loads what both have; load.key_mapping={{OLD.*: NEW.*}} renames."
        return OTHER_MODEL

    @property
    def prefix_mapping(self) -> dict[str, str] | None:
        """The `key_mapping` that adds or removes one prefix, if it maps most of the names; else None."""
        for longer, shorter in ((self.unexpected, self.missing), (self.missing, self.unexpected)):
            # A dict, not a set: with two prefixes that fit, every process suggests the same.
            prefixes = {
                name[: index + 1]: None for name in longer for index, letter in enumerate(name) if letter == "."
            }
            for prefix in prefixes:
                stripped = {name.removeprefix(prefix) for name in longer if name.startswith(prefix)}
                # More than half: a few layers may differ, such as a new head.
                if 2 * len(stripped.intersection(shorter)) > len(shorter):
                    return {f"{prefix}*": "*"} if longer is self.unexpected else {"*": f"{prefix}*"}
        return None


def list_by_owner(title: str, rows_of: Mapping[str, Sequence[str]]) -> str:
    """A title, and under it each owner's lines; an owner without a name has no column."""
    width = max(map(len, rows_of), default=0)
    rows = []
    for owner, owner_rows in rows_of.items():
        indent = f"  {owner:<{width}}  " if owner else "  "
        rows += [indent + row for row in owner_rows]
    more = [f"  … and {len(rows) - _MAX_LISTED} more"] if len(rows) > _MAX_LISTED else []
    return "\n".join([f"{title}:", *rows[:_MAX_LISTED], *more])
