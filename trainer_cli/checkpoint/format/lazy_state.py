"""A state tree whose tensors are read lazily: shapes and dtypes first, values later, straight into their targets.

In between, the owners of the state report what does not fit, and bind tensors to the memory of a model or optimizer.
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
    """The `verify` of a state that was read whole."""


class LazyState:
    """A tree, some of whose tensors have no values until `read`. All others have theirs, not yet verified.

    Args:
        tree: the state; its lazy tensors are neither read nor written to before `read`.
        lazy: these tensors.
        read_into: reads all lazy tensors, each into its target or else into itself; raises where the digest differs.
        verify: reads all bytes without keeping them, and raises likewise.
    """

    def __init__(
        self,
        tree: dict[str, Any],
        lazy: Iterable[torch.Tensor] = (),
        read_into: Callable[[Targets], None] | None = None,
        verify: Callable[[], None] = nothing_to_verify,
    ) -> None:
        self.tree = tree
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Context within which files are read; it translates errors of the storage."""
        self._lazy = {id(one): one for one in lazy}
        self._read_into, self._verify = read_into, verify
        self._targets: dict[int, torch.Tensor] = {}

    def is_lazy(self, given: torch.Tensor) -> bool:
        """True for a tensor of the tree that has neither values nor a target yet."""
        return self._read_into is not None and id(given) in self._lazy and id(given) not in self._targets

    def bind(self, given: torch.Tensor, target: torch.Tensor) -> None:
        """Have `read` write the values of a lazy tensor into `target`, of the same shape and dtype."""
        assert self.is_lazy(given) and can_take(target)
        assert target.shape == given.shape and target.dtype == given.dtype
        self._targets[id(given)] = target

    def placed(self, given: Any) -> Any:
        """The target of a lazy tensor of the tree; anything else is returned as it is."""
        return self._targets.get(id(given), given)

    def read(self) -> None:
        """Read the values of all lazy tensors, once; every byte is verified on the way.

        Raises:
            DamagedCheckpoint: it is not what was written. Targets hold NaN then, where they can: they were written
                to, so that they are not mistaken for their old values nor for the saved ones.
        """
        read_into, self._read_into = self._read_into, None
        if read_into is None:
            return
        try:
            with self.around():
                read_into(self._targets)
        except BaseException as error:
            overwritten = [target for target in self._targets.values() if _fill_with_nan(target)]
            if overwritten and isinstance(error, CheckpointError):
                error.cure = (
                    error.cure or "The tensors being loaded hold NaN now: load another checkpoint before using them."
                )
            raise

    def verify(self) -> None:
        """Read all of it without keeping anything, so that damage is reported as damage, not by its effects.

        Raises:
            DamagedCheckpoint: it is not what was written.
        """
        if self._read_into is not None:
            with self.around():
                self._verify()


def can_take(target: Any) -> bool:
    """True for a tensor whose memory may be written knowing only its shape, strides and dtype."""
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and target.layout is torch.strided
        and not (target.is_meta or target.is_quantized or target.is_conj() or target.is_neg())
        and target.numel() > 0
    )


def _fill_with_nan(target: torch.Tensor) -> bool:
    if not (target.is_floating_point() or target.is_complex()):
        return False
    with torch.no_grad():
        target.fill_(float("nan"))
    return True
