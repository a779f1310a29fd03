"""Parts that a sweep asks for: what draws its trials, and what chooses which of them trains next.

`search.NAME` is a `Draw`, which a sweep asks for by the name that `sweep.search` has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from trainer_cli.parts import AddOnPart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


class Numbers(NamedTuple):
    """All numbers from `low` to `high`: whole ones if both are."""

    low: float
    high: float
    is_log: bool = False
    """Whether they are drawn evenly by their logarithm."""


Space: TypeAlias = "Mapping[str, Sequence[Any] | Numbers]"
"""Config key -> what it may be in a trial."""


class Trial(NamedTuple):
    """A trial of a sweep: its values by config key, and its loss at each rung that it has reached."""

    values: Mapping[str, Any]
    losses: Sequence[float] = ()
    has_ended: bool = False


class Draw(Protocol):
    def __call__(self, space: Space, seed: int, trials: Sequence[Trial]) -> Mapping[str, Any]: ...


class TrialSearch(Protocol):
    """The trials of a search, see `addons/search/search.py`."""

    @property
    def is_complete(self) -> bool: ...

    def choose(self) -> tuple[str, str | None] | None: ...

    def measure(self, key: str, metric: str, loss: float | None, step: int | None) -> None: ...

    def follow(self, key: str, step: int | None) -> None: ...

    def leave(self, key: str, *, is_killed: bool = False) -> None: ...

    def why_paused(self, key: str) -> str | None: ...


class OpenSearch(Protocol):
    def __call__(
        self,
        file: Path,
        rules: Mapping[str, Any],
        begin: Callable[[Mapping[str, Trial]], tuple[str, Mapping[str, Any]] | None],
        restore: Callable[[str, Mapping[str, Any]], bool],
    ) -> TrialSearch: ...


SEARCH: AddOnPart[OpenSearch] = AddOnPart("sweep.search")
"""Chooses which trial of a sweep trains next, and how far. For sweeps in which that follows from results."""
