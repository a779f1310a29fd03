"""The classes of faults: each module named here has `CLASSES`, a tuple of them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from campaign.fault_class import FaultClass

MODULES = (
    "campaign.kills",
    "campaign.kill_points",
    "campaign.source",
    "campaign.replacements",
    "campaign.uploads",
    "campaign.copies",
    "campaign.power_cuts",
    "campaign.corruption",
    "campaign.io_errors",
    "campaign.full_disk",
    "campaign.slow_disk",
    "campaign.folders",
    "campaign.clock",
    "campaign.signals",
    "campaign.two_processes",
    "campaign.worker_death",
    "campaign.memory",
    "campaign.not_finite",
    "campaign.hooks",
    "campaign.hostile",
    "campaign.torn_logs",
    "campaign.ranks",
    "campaign.devices",
    "campaign.compared",
    "campaign.searched",
    "campaign.experiments",
    "campaign.long_tests",
)  # fmt: skip
"""Faults of `train`: the first table, in this order."""
PEER_MODULES = ("campaign.peers_trials",)
"""The same faults for several contenders, run by `--peers`: the second table."""


def load_classes(modules: Sequence[str] = MODULES) -> list[FaultClass]:
    """The classes of these modules, in order; their keys differ."""
    classes = [fault for module in modules for fault in _classes_of(module)]
    keys = [fault.key for fault in classes]
    assert len(set(keys)) == len(keys), f"two classes have one key: {sorted(keys)}"
    return classes


def _classes_of(module: str) -> Sequence[FaultClass]:
    """None of a module about an add-on that was deleted."""
    try:
        classes: Sequence[FaultClass] = import_module(module).CLASSES
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("trainer_cli.addons."):
            raise
        return ()
    return classes
