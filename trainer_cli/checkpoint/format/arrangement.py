"""Where each tensor of a state goes in its file, and when it is copied: found out once, and kept while all stay alike.

That they do is found out anew at each save, while the training waits. Each tensor is far from all caches by then, so it
is asked for little, and for nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer_cli.checkpoint.format.layout import TensorEntry, rendered_header
from trainer_cli.checkpoint.format.leaves import identity, laid_out

if TYPE_CHECKING:
    from trainer_cli.checkpoint.format.codec import Leaf
    from trainer_cli.checkpoint.format.home import Home

_ORDINARY = {torch.Tensor, torch.nn.Parameter, np.ndarray}

Slot = tuple[TensorEntry, int]
"""A tensor's entry, and where it lies."""
Place = int | None
"""Where a tensor begins; 0 where it has no memory, None for what is no tensor."""


class Arrangement:
    """The slots of a file, and what goes there; filled again for each state."""

    def __init__(self) -> None:
        self.header = b""
        self.size_bytes = 0
        """Of the file."""
        self.slots: list[Slot] = []
        """Those with any bytes, from the beginning on."""
        self.aliases: dict[str, str] = {}
        """Names of tied tensors, and the name under which each is stored."""
        self.leaves: list[Leaf] = []
        """What goes to each slot."""
        self._places: list[Place] = []
        """And where it begins."""
        self._layout: list[TensorEntry] = []
        self._order: list[int] = []
        """The number of each slot's leaf among all of the state."""
        self._form: _Form | None = None
        self._all_places: list[Place] = []
        """Where each leaf of the state begins."""
        self._counts = 0, 0
        self._roles: Roles | None = None

    def fill(self, tensors: Mapping[str, Leaf]) -> bool:
        """Find a slot for each tensor; True where slots are others than before.

        Raises:
            UnsavableState: naming what a file cannot hold.
        """
        leaves: list[Any] = list(tensors.values())
        try:
            places = [None if type(leaf) is np.ndarray else leaf.data_ptr() for leaf in leaves]
        except (RuntimeError, ValueError):
            # A tensor without an address is one that no file can hold: it is named here.
            laid_out(tensors)
            raise
        form = _Form.of(list(tensors), leaves)
        counts = self._counts if places == self._all_places else _counted(places)
        anew = form is None or form != self._form or counts != self._counts or not self._still_tied(tensors)
        if anew:
            self._lay_out(tensors)
            # Where tensors begin at the same place and are yet not tied, only a closer look tells them apart.
            self._form = form if counts[1] + len(self.aliases) == counts[0] else None
        self._counts, self._all_places = counts, places
        self.leaves = [leaves[number] for number in self._order]
        self._places = [places[number] for number in self._order]
        return anew

    def roles(self, late: Sequence[int], trained: Sequence[int]) -> Roles:
        """What becomes of the tensors that begin at these addresses, and of all others."""
        roles = self._roles
        if roles is None or not roles.still_suit(self.leaves, self._places, late, trained):
            roles = self._roles = Roles(self.slots, self.leaves, self._places, late, trained)
        return roles

    def empty(self) -> None:
        """Hold on to no tensor."""
        self.leaves = []

    def _lay_out(self, tensors: Mapping[str, Leaf]) -> None:
        layout, aliases = laid_out(tensors)
        if layout != self._layout or not self.header:
            self._layout, self.header = layout, rendered_header(layout)
        self.aliases = aliases
        numbers = {name: number for number, name in enumerate(tensors)}
        offset, self.slots, self._order, self._roles = len(self.header), [], [], None
        for entry in layout:
            if entry.size_bytes:
                self.slots.append((entry, offset))
                self._order.append(numbers[entry.name])
            offset += entry.size_bytes
        self.size_bytes = offset

    def _still_tied(self, tensors: Mapping[str, Leaf]) -> bool:
        """Whether those that were stored under another's name are still that other."""
        return all(identity(tensors[name]) == identity(tensors[first]) for name, first in self.aliases.items())


@dataclass(frozen=True, slots=True)
class _Form:
    """All that a layout depends on, but for which tensors are tied."""

    names: list[str]
    types: list[torch.dtype | np.dtype[np.generic]]
    shapes: list[tuple[int, ...]]

    @classmethod
    def of(cls, names: list[str], leaves: Sequence[Leaf]) -> _Form | None:
        """None where some are of a kind that needs a closer look."""
        if not set(map(type, leaves)) <= _ORDINARY:
            return None
        return cls(names, [leaf.dtype for leaf in leaves], [leaf.shape for leaf in leaves])


def _counted(places: Iterable[Place]) -> tuple[int, int]:
    """How many tensors begin somewhere, and at how many places."""
    placed = [place for place in places if place]
    return len(placed), len(set(placed))


class Roles:
    """Which slots hold tensors that change no sooner than the optimizer's step, which trained ones, which neither."""

    def __init__(
        self,
        slots: Sequence[Slot],
        leaves: Sequence[Leaf],
        places: Sequence[Place],
        late: Sequence[int],
        trained: Sequence[int],
    ) -> None:
        self._told = list(late), list(trained)
        of_late, of_trained = set(late), set(trained)
        known = of_late | of_trained
        self._known_at = [at for at, place in enumerate(places) if place in known]
        self._known_places = [places[at] for at in self._known_at]
        self._known = known
        self._unknown_at = [at for at, place in enumerate(places) if place not in known]
        # Of an inference tensor no version tells whether it changed.
        telling = [at for at in self._known_at if not leaves[at].is_inference()]  # type: ignore[union-attr]
        self._all_tell = len(telling) == len(self._known_at)
        self.late_at = [at for at in telling if places[at] in of_late]
        """The numbers of the slots whose tensors change late."""
        self.early_at = sorted(set(range(len(slots))).difference(self.late_at))
        """Of all others."""
        self.late = [slots[at] for at in self.late_at]
        self._late_places = [places[at] for at in self.late_at]
        self.trained = [slots[at] for at in self._known_at if places[at] in of_trained]
        self._home: Home | None = None
        self._at_home: tuple[list[int], list[int]] | None = None

    def still_suit(
        self, leaves: Sequence[Leaf], places: Sequence[Place], late: Sequence[int], trained: Sequence[int]
    ) -> bool:
        """Whether they are those of the same slots filled again."""
        known = [leaves[at] for at in self._known_at]
        return (
            self._all_tell
            and (late, trained) == self._told
            and [places[at] for at in self._known_at] == self._known_places
            and self._known.isdisjoint([places[at] for at in self._unknown_at])
            and not any(map(torch.Tensor.is_inference, known))  # type: ignore[arg-type]
        )

    def at_home(self, home: Home) -> tuple[list[int], list[int]] | None:
        """Of the late ones, the numbers of those that live in a home, and of the others. None where one that moved in
        is not at its place any more, or changes early."""
        if home is not self._home:
            found = zip(self.late, self._late_places, self.late_at, strict=True)
            late = {slot[0].name: (place, at) for slot, place, at in found}
            tenants = [late.get(name, (None, -1)) for name in home.tenants]
            all_there = [place for place, _ in tenants] == list(home.tenants.values())
            inside = {at for _, at in tenants}
            self._home = home
            self._at_home = (sorted(inside), [at for at in self.late_at if at not in inside]) if all_there else None
        return self._at_home


class Watch:
    """Tensors whose versions are to stay what they were when this was made."""

    def __init__(self, slots: Sequence[Slot] = (), leaves: Sequence[Any] = ()) -> None:
        self.slots, self.leaves = slots, leaves
        self._versions = [leaf._version for leaf in leaves]

    def moved(self) -> list[str]:
        """The names of those of which they are not."""
        versions = [leaf._version for leaf in self.leaves]
        if versions == self._versions:
            return []
        looks = zip(self.slots, versions, self._versions, strict=True)
        return [slot[0].name for slot, now, before in looks if now != before]


def lie_plainly(tensors: Iterable[torch.Tensor]) -> bool:
    """True where the bytes of each, wherever they are, are those of a file."""
    tensors = list(tensors)
    return (
        all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_conj, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
    )
