"""Ask add-ons for parts: what is asked for about checkpoints, steps and commands, each with its type.

An add-on names the parts that it brings in its `addon.py`. Who asks for one names no add-on:

    READ_FOREIGN.need(str(path))     the part, or an error that names the missing add-on
    FAILED_STEP.find()               the part or None, for what is left out if nobody can do it
    CHECKS.each()                    those of all add-ons

What fits ask for is in `fit_parts.py`, what sweeps do in `search_parts.py`. Besides these, `format.NAME` is a format of
checkpoints, which `format` asks for by its name, `storage.SCHEME` a storage for URLs, or `storage.*` for all others
(`storage`), and `copies.open` makes the copies of a run's checkpoints (`callbacks`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from trainer_cli.addon import each_addon, each_part, find_part
from trainer_cli.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from trainer_cli.commands import Action, Check
    from trainer_cli.runs import RunDir

T = TypeVar("T")


class AddOnPart(Generic[T]):
    """A function, class or value that add-ons bring under a name.

    Args:
        name: its name in `AddOn.parts`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def find(self) -> T | None:
        """The part of the first add-on that brings it; None without any."""
        return cast("T | None", find_part(self.name))

    def each(self) -> Iterator[T]:
        """The parts of all add-ons that bring it."""
        return cast("Iterator[T]", each_part(self.name))

    def need(self, request: str, where: str | None = None) -> T:
        """The part, for what cannot be done without.

        Args:
            request, where: see `explain_missing`.

        Raises:
            UserError: no add-on brings it.
        """
        part = self.find()
        if part is None:
            # A part that this program has never brought is not asked for.
            raise explain_missing(request, "parts", self.name, where) or AssertionError(self.name)
        return part


@cache
def _read_shipped() -> Mapping[str, Mapping[str, Sequence[str]]]:
    """What each add-on of this program brings, also those that this installation lacks."""
    shipped: Mapping[str, Mapping[str, Sequence[str]]] = json.loads(
        (Path(__file__).parent / "addons" / "shipped.json").read_text(encoding="utf-8")
    )
    return shipped


def list_addons() -> dict[str, str]:
    """The name of each add-on, with whether it is shipped with this program, missing, or installed beside it."""
    missing = dict.fromkeys(_read_shipped(), "missing")
    return missing | {name: "shipped" if name in missing else "installed" for name, _ in each_addon()}


def explain_missing(request: str, kind: str, name: str, where: str | None = None) -> UserError | None:
    """The error for what needs an add-on of this program that is missing; None if no missing add-on brings it.

    Args:
        request: what needs it, such as `train replay`.
        kind: `verbs`, `names`, `parts` or `configs`.
        name: of the verb, public name, part or config that is not there.
        where: the key that asks for it.
    """
    addon = next((addon for addon, brings in _read_shipped().items() if name in brings[kind]), None)
    if addon is None or addon in dict(each_addon()):
        return None
    return UserError(
        f"{request} needs the add-on '{addon}', which this installation lacks",
        where=where,
        cure="Install trainer-cli again, or do without it.",
    )


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """The weights of another program's checkpoint, on the CPU."""

    program: str
    """What wrote it, as far as its content shows: "Lightning checkpoint", "DCP folder" and so on."""
    model: dict[str, Tensor]
    step: int | None = None
    """The optimizer step at which it was saved, if it says so."""
    versions: Mapping[str, int] | None = None
    """The versions of the saved modules by path; None: the checkpoint has none."""


class ReadForeign(Protocol):
    def __call__(self, path: Path, *, allow_pickle: bool = False) -> ForeignCheckpoint: ...


READ_FOREIGN: AddOnPart[ReadForeign] = AddOnPart("checkpoint.read_foreign")
"""Reads the weights of another program's checkpoint. For loads of all kinds, and exports."""


class ReadRank(Protocol):
    def __call__(self, path: Path, rank: int, only: Collection[str] | None = None) -> dict[str, Any] | None: ...


READ_RANK: AddOnPart[ReadRank] = AddOnPart("checkpoint.read_rank")
"""Reads what one rank saved in a file of another program; None if there is no file of a rank. For `Checkpointer`."""
IS_ARCHIVE: AddOnPart[Callable[[Path], bool]] = AddOnPart("checkpoint.is_archive")
"""Whether a file is an archive of a whole checkpoint. For paths to load."""
EXTRACT_ARCHIVE: AddOnPart[Callable[[Path], Path]] = AddOnPart("checkpoint.extract_archive")
"""Extracts such an archive into the user's cache. For paths to load."""


class ReplayStep(Protocol):
    def __call__(
        self,
        run: Path,
        step: int,
        *,
        replays: bool = True,
        overrides: Sequence[str] = (),
        config_dir: Path | None = None,
    ) -> None: ...


REPLAY_STEP: AddOnPart[ReplayStep] = AddOnPart("checkpoint.replay_step")
"""Computes the checkpoint of a step that was not kept, or says how. For `RUN@stepN`."""


class DescribeSteps(Protocol):
    def __call__(self, run: Path, first: int, last: int, *, loads: bool = True) -> str | None: ...


FAILED_STEP: AddOnPart[DescribeSteps] = AddOnPart("hint.failed_step")
"""A sentence with the commands that look at steps, of which one has failed. For the error that ends a fit."""
FAILED_EVALUATION: AddOnPart[Callable[[Path, int], str | None]] = AddOnPart("hint.failed_evaluation")
"""A sentence with the command that looks at the evaluation after a step. For errors and warnings of a fit."""
EARLIEST_START: AddOnPart[Callable[[RunDir], int | None]] = AddOnPart("replay.earliest_start")
"""The earliest step after which steps of a run can be made again. For reports."""


CKPT_ACTIONS: AddOnPart[Mapping[str, Action]] = AddOnPart("ckpt.actions")
"""Actions of `train ckpt` by name."""
CHECKS: AddOnPart[Mapping[str, Check]] = AddOnPart("check.checks")
"""Checks of `train check` by name."""


class FindOrigin(Protocol):
    def __call__(self, dataset: Any, key: Any) -> tuple[Any, Sequence[str], Sequence[tuple[Any, ...]]]: ...


FIND_ORIGIN: AddOnPart[FindOrigin] = AddOnPart("data.find_origin")
"""The key of a sample within the source that it comes from, the names of nested sources, and the documents in it. For
the samples of a step."""
