"""The states of the global random generators of python, numpy and torch."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def capture_rng() -> dict[str, Any]:
    """The states of the global generators of python, numpy and torch, and of the devices in use."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
        "numpy": {
            "kind": kind,
            "keys": np.array(keys),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": [],
        "mps": None,
    }
    if _cuda_in_use():
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["current_cuda"] = torch.cuda.current_device()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any], *, warn: bool = False) -> None:
    """Restore every generator. Do this last: later draws would change the run.

    Args:
        warn: warn if the number of GPUs differs from that of the state.
    """
    if warn:
        _warn_of_other_devices(state)
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(int(word) for word in python["words"]), python["gauss"]))
    np.random.set_state((legacy["kind"], legacy["keys"], legacy["position"], legacy["has_gauss"], legacy["cached"]))
    torch.set_rng_state(state["torch"])
    for index, device_state in enumerate(state["cuda"][: _cuda_devices()]):
        torch.cuda.set_rng_state(device_state, index)
    # The run may continue on a GPU of another number.
    if _cuda_devices() and (current := state.get("current_cuda")) is not None:
        torch.cuda.set_rng_state(state["cuda"][current])
    if state["mps"] is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


@contextmanager
def rng_kept() -> Iterator[None]:
    """Restore every generator after the block, also after an error."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)


def _warn_of_other_devices(state: Mapping[str, Any]) -> None:
    """Warn if a state is of another number of GPUs than there are, unless neither run uses one."""
    moves = "current_cuda" in state and _cuda_devices() > 0
    if len(state["cuda"]) != _cuda_devices() and not moves and (state["cuda"] or _cuda_in_use()):
        logger.warning(
            "the checkpoint has random states of %d GPUs, but there are %d here: "
            "random numbers drawn on a GPU will differ from an uninterrupted run",
            len(state["cuda"]),
            _cuda_devices(),
        )


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
