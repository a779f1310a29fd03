"""Seconds from the start of the process to the end of the first step, beside a plain script."""

from __future__ import annotations

from contenders import contenders, import_of
from settings import Settings
from table import Column, Row, Table
from timing import interleaved

OURS = ["bare, fused", "bare", "train fit"]
PEERS = ["Lightning", "Lightning, barebones", "Fabric", "accelerate", "HF Trainer", "ignite"]
STEPS = 3


def measure(settings: Settings) -> list[Table]:
    """One table: the first round reads what is not in the page cache yet, and does not count."""
    ours = settings.pick(smoke=["bare, fused", "train fit"], quick=OURS, whole=OURS)
    measures = contenders(ours + ([] if settings.small else PEERS), STEPS, 0)
    measures["import torch, and no more"] = import_of("import torch")
    samples, skipped = interleaved(measures, settings.rounds_or(3, 3), warm=settings.warm, needed=ours)
    rows = [
        Row(name, {"first step": found["first step"], "processor": found["first step, processor"]})
        for name, found in samples.items()
    ]
    return [
        Table(
            "start", "To the end of the first step", "bare, fused",
            [Column("first step", "s", 2, resolution=0.03), Column("processor", "s", 2, resolution=0.03)],
            rows, {"steps": STEPS}, skipped,
            ["`bare, fused` is the plain script with the model and the optimizer of `train fit`."],
        )
    ]  # fmt: skip
