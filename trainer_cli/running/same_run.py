"""Whether a new run would only repeat one that is finished."""

from __future__ import annotations

from collections.abc import Mapping
from glob import escape, iglob
from pathlib import Path
from typing import Any

from trainer_cli.layout import SWEEP_FOLDER
from trainer_cli.runs import BestSettings, RunDir
from trainer_cli.steps import RunStatus

_MATTERING = ("ckpt", "device", "load", "loop", "model_call", "parallel")
"""Sections on which results depend, and in which runs of one kept source may differ."""


def describe_same_run(run: RunDir, source: str, values: Mapping[str, Any]) -> str | None:
    """A sentence on a finished run beside this one that has the same source, config and data; None without any.

    Args:
        source: the digest of the source that the new run keeps.
        values: of its config.
    """
    root = run.path.parents[2] if run.path.parent.name == SWEEP_FOLDER else run.path.parent
    for runs in ("*", f"*/{SWEEP_FOLDER}/*"):
        # Most runs have another source: nothing else of them is read.
        for kept in iglob(f"{escape(str(root))}/{runs}/{run.source_folder.name}/{source}"):
            other = RunDir(Path(kept).parents[1])
            summary, stored = other.read_summary(), other.values
            is_same = all(stored.get(section) == values.get(section) for section in _MATTERING)
            if is_same and other.path != run.path and summary.get("status") == RunStatus.finished:
                best = summary.get("best_metrics") or {}
                rule = BestSettings.of(stored).rule(best)
                result = "" if rule is None else f"; its best {rule.metric} is {best[rule.metric]['value']:.4g}"
                return f"{other.path} is a finished run of the same config, source and data{result}"
    return None
