"""A state that is known before it is read: the shapes of its tensors are there, their values come later, and once.

In between its owners say what does not fit, and where the values are to go: straight into a model's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trainer_cli.errors import CheckpointError

Targets = Mapping[int, torch.Tensor]
"""By the `id` of the tensor that stands in the tree."""


def nothing_to_verify() -> None:
    """Of what was read already."""


class LazyState:
    """A tree, some of whose tensors have no values until `fill`. All others have theirs, not yet proven right.

    Args:
        tree: the state; its tensors without values are not written to, nor read, before `fill`.
        waiting: these tensors.
        fill: reads everything, each of these into itself or into its target, and raises where the digest differs.
        prove: reads everything into nothing, and raises likewise.
    """

    def __init__(
        self,
        tree: dict[str, Any],
        waiting: Iterable[torch.Tensor] = (),
        fill: Callable[[Targets], None] | None = None,
        prove: Callable[[], None] = nothing_to_verify,
    ) -> None:
        self.tree = tree
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        """What reading happens within: whoever opened the files tells there what is wrong with them."""
        self._waiting = {id(one): one for one in waiting}
        self._fill, self._prove = fill, prove
        self._targets: dict[int, torch.Tensor] = {}

    def awaits(self, given: torch.Tensor) -> bool:
        """True for a tensor of the tree that has no values yet, and no target."""
        return self._fill is not None and id(given) in self._waiting and id(given) not in self._targets

    def into(self, given: torch.Tensor, target: torch.Tensor) -> None:
        """Have the values of a tensor that awaits them written into `target`, of the same shape and type, by `fill`."""
        assert self.awaits(given) and can_take(target)
        assert target.shape == given.shape and target.dtype == given.dtype
        self._targets[id(given)] = target

    def placed(self, given: Any) -> Any:
        """Where the values of a tensor of the tree are, or will be; anything else is itself."""
        return self._targets.get(id(given), given)

    def fill(self) -> None:
        """Read all that is still to come, once; every byte is proven on the way.

        Raises:
            DamagedCheckpoint: it is not what was written. Targets hold NaN then, where they can: they were written
                to, so nobody may take them for what they were, nor for what was saved.
        """
        fill, self._fill = self._fill, None
        if fill is None:
            return
        try:
            with self.around():
                fill(self._targets)
        except BaseException as error:
            spoilt = [target for target in self._targets.values() if _spoil(target)]
            if spoilt and isinstance(error, CheckpointError):
                error.cure = error.cure or "What was being filled holds NaN now: load another before it is used."
            raise

    def prove(self) -> None:
        """Read all of it without keeping anything, so that damage is told as damage, not as what follows from it.

        Raises:
            DamagedCheckpoint: it is not what was written.
        """
        if self._fill is not None:
            with self.around():
                self._prove()


def can_take(target: Any) -> bool:
    """True for a tensor whose memory may be written to by whoever knows its shape, strides and type alone."""
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and target.layout is torch.strided
        and not (target.is_meta or target.is_quantized or target.is_conj() or target.is_neg())
        and target.numel() > 0
    )


def _spoil(target: torch.Tensor) -> bool:
    if not (target.is_floating_point() or target.is_complex()):
        return False
    with torch.no_grad():
        target.fill_(float("nan"))
    return True
