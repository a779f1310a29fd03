"""Microseconds a step of a tiny network: what a trainer costs over a loop written by hand."""

from __future__ import annotations

from contenders import contenders
from settings import Settings
from table import Column, Row, Table
from timing import interleaved

OURS = ["bare", "bare, fused", "bare, collating", "train fit", "train fit, not fused", "train fit, own loader"]
# The smallest form of the start table runs the others.
SMOKE = ["bare", "bare, collating", "train fit, not fused", "train fit, own loader"]
PEERS = [
    "Lightning", "Lightning, barebones", "Fabric", "accelerate", "HF Trainer", "HF Trainer, barest", "ignite",
]  # fmt: skip
BASES = {"train fit, own loader": "bare, collating"}


def measure(settings: Settings) -> list[Table]:
    """One table: ours as shipped, by hand, and the peers that are installed."""
    steps, warm = settings.pick(smoke=(20, 5), quick=(1200, 300), whole=(2500, 500))
    rounds = settings.rounds_or(3, 3)
    ours = settings.pick(smoke=SMOKE, quick=OURS, whole=OURS)
    measures = contenders(ours + ([] if settings.small else PEERS), steps, warm)
    samples, skipped = interleaved(measures, rounds, warm=0, needed=ours)
    rows = [
        Row(name, {"step": found["step"], "processor": found["processor"]}, base=BASES.get(name))
        for name, found in samples.items()
    ]
    for row in rows:
        base = samples[row.base or "bare"]["step"]
        row.samples["over base"] = [own - other for own, other in zip(row.samples["step"], base, strict=True)]
    return [
        Table(
            "loop", "A step of a tiny MLP", "bare",
            [
                Column("step", "µs", 1, resolution=5.0),
                Column("over base", "µs", 1, resolution=15.0, ratio=False),
                Column("processor", "µs", 1, resolution=5.0),
            ],
            rows, {"steps": steps, "warm": warm}, skipped,
            [
                "`train fit` is the shipped configuration (fused AdamW, checkpointer, console, metrics.jsonl, "
                "TensorBoard); `not fused` has the optimizer of `bare`. `own loader` collates samples into batches, "
                "and is compared with a DataLoader that does the same (`bare, collating`, fused)."
            ],
        )
    ]  # fmt: skip
