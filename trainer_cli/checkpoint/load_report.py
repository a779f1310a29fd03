"""What was loaded of a model, what was not, and what can be done about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

OTHER_MODEL = "The model must have the layers and shapes that the checkpoint was saved with."


@dataclass(slots=True)
class LoadReport:
    """What was loaded from a checkpoint, and what was not: names as the model has them."""

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
        return rows + [f"{number} tensor{'s'[: number != 1]}: cast from {how}" for how, number in count.items()]

    @property
    def globs_of_reshaped(self) -> list[str]:
        """The `ignore_keys` for the layers of the tensors of another shape: those tensors, and what else is directly in
        their layers. A tensor beside whole layers is named alone, or a glob would ignore these too."""
        names = [*self.loaded, *self.missing, *self.unexpected]
        globs = set()
        for name in self.reshaped:
            layer = name.rpartition(".")[0]
            inside = [other.removeprefix(f"{layer}.") for other in names if other.startswith(f"{layer}.")]
            globs.add(f"{layer}.*" if layer and not any("." in other for other in inside) else name)
        return sorted(globs)

    def __str__(self) -> str:
        """How many tensors were loaded, and what happened to the others."""
        total = len(self.loaded) + len(self.missing) + len(self.ignored)
        return f"{len(self.loaded)} of {total} tensors" if self.missing or self.ignored else f"{total} tensors"


def advice(report: LoadReport) -> str:
    """What to do about weights that do not fit."""
    if report.reshaped:
        globs = ",".join(report.globs_of_reshaped)
        return f"To keep the model's own values of these layers, add 'load.ignore_keys=[{globs}]'."
    if (mapping := prefix_mapping(report.missing, report.unexpected)) is not None:
        ((old, new),) = mapping.items()
        return f"The names differ by a prefix: add 'load.key_mapping={{{old}: {new}}}'."
    if report.one_sided:
        return f"{OTHER_MODEL} load.strict=false loads what both have; load.key_mapping={{OLD.*: NEW.*}} renames."
    return OTHER_MODEL


def prefix_mapping(missing: list[str], extra: list[str]) -> dict[str, str] | None:
    """The `key_mapping` that gives the model most of what it misses, if one prefix is what differs."""
    for longer, shorter in ((extra, missing), (missing, extra)):
        prefixes = {name[: at + 1]: None for name in longer for at, char in enumerate(name) if char == "."}
        for prefix in prefixes:
            stripped = {name.removeprefix(prefix) for name in longer if name.startswith(prefix)}
            if 2 * len(stripped.intersection(shorter)) > len(shorter):
                return {f"{prefix}*": "*"} if longer is extra else {"*": f"{prefix}*"}
    return None
