"""`observe(name, tensor)`: mark a tensor inside a model, so that callbacks can look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Observer = Callable[[str, Tensor], None]

_observers: list[Observer] = []


def observe(name: str, tensor: Tensor) -> Tensor:
    """Show a tensor to every active observer, such as a TensorListener; returns the tensor itself.

    Without observers this costs one test. Inside a compiled model observers are not called.
    """
    for observer in _observers:
        observer(name, tensor)
    return tensor


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call a function for each tensor that is observed inside the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
