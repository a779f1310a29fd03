"""The range test of a report: the loss at each learning rate that `optimizer.lr=auto` tried, and the one it took."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainer_cli.addons.view.report_blocks import Block
from trainer_cli.auto_values import LR
from trainer_cli.runs import RunDir, RunRecord

_AXIS = "learning rate"


def range_test(records: Sequence[RunRecord]) -> Iterator[Block]:
    """A chart of the range tests of the runs, if there are some."""
    curves, marks = [], []
    for run, record in enumerate(records):
        decision = _read_decision(record)
        if decision is None:
            continue
        rates, losses = decision["measured"]["rates"], decision["measured"]["losses"]
        facts = {"run": run, "name": "loss", "group": "loss", "role": "", "epoch": None, "time": None}
        curves.append({**facts, "step": list(range(len(rates))), _AXIS: rates, "y": losses})
        marks.append({"run": run, _AXIS: decision["value"], "text": f"taken: {decision['value']:g}"})
    if curves:
        title = "Smoothed loss by learning rate, before the first step"
        yield {"kind": "chart", "title": title, "axis": _AXIS, "logx": True, "curves": curves, "restarts": marks}


def _read_decision(record: RunRecord) -> Mapping[str, Any] | None:
    """What was measured for the learning rate that the run has; None if it was given."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        decision = json.loads(RunDir(record.path).decisions_file.read_bytes())[LR]
        # A run without a checkpoint may have been started again with a number.
        if float(record.config[LR]) == decision["value"] and decision["measured"]["rates"]:
            return dict(decision)
    return None
