"""Every kind of stop under every kind of training: bit-identical to going straight through.

The suite runs each stop once, under trainings in which as many pairs of choices meet as can; `TRAIN_MATRIX=full` runs
the whole product (scripts/faults). Augmentation, dropout and batch norm are on in all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import combinations, product
from pathlib import Path

import pytest
from command import train
from compare import assert_same_run

CHOICES: dict[str, tuple[str, ...]] = {
    "stop": (
        "mid-epoch", "epoch-end", "killed-in-accumulation", "after-evaluation", "sigterm", "twice", "second-epoch",
    ),
    "workers": ("0", "1", "2"),
    "accumulate": ("1", "3"),
    "dtype": ("fp32", "bf16"),
    "optimizer": ("sgd", "adamw"),
    "ema": ("off", "on"),
}  # fmt: skip
Cell = tuple[str, ...]

TRAINING = (
    "experiment=digits",
    "model.channels=[4,8,8]",
    "loop.limit_train_batches=13",
    "loop.max_duration=3ep",
    "loop.eval_steps=2",
    "checkpoint.save_interval=1ep",
    "+callbacks.interrupt._target_=interrupts.Interrupt",
)
"""Three epochs of 13 batches: 13 steps each or, of three batches, 5, of which the last has one batch only."""
CADENCE = {
    "1": ("loop.eval_interval=8", "loop.log_interval=3", "checkpoint.ephemeral_save_interval=4"),
    "3": ("loop.eval_interval=3", "loop.log_interval=2", "checkpoint.ephemeral_save_interval=2"),
}
OPTIMIZER = {"sgd": ("optimizer=sgd", "optimizer.lr=0.05"), "adamw": ()}
EMA = ("+callbacks.ema._target_=trainer_cli.EMA", "+callbacks.ema.decay=0.9")
STOPS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mid-epoch": {"1": ("SIGUSR1 train 6 0",), "3": ("SIGUSR1 train 2 0",)},
    "epoch-end": {"1": ("SIGINT train 12 0",), "3": ("SIGINT train 4 0",)},
    "killed-in-accumulation": {"1": ("SIGKILL train 10 0",), "3": ("SIGKILL train 3 1",)},
    "after-evaluation": {"1": ("SIGKILL train 8 0",), "3": ("SIGKILL train 6 0",)},
    "sigterm": {"1": ("SIGTERM train 9 0",), "3": ("SIGTERM train 3 2",)},
    "twice": {"1": ("SIGTERM train 7 0", "SIGTERM train 8 0"), "3": ("SIGTERM train 2 0", "SIGTERM train 3 0")},
    "second-epoch": {"1": ("SIGKILL train 21 0",), "3": ("SIGTERM train 8 0",)},
}
"""When each stop comes, by the number of batches in a step: `Interrupt`'s words, one for each process."""


def cover() -> list[Cell]:
    """A cell for each stop, greedily the one with most pairs of choices that have not met yet."""
    everything = list(product(*CHOICES.values()))
    left = {pair for cell in everything for pair in combinations(enumerate(cell), 2)}
    chosen = []
    for stop in CHOICES["stop"]:
        # With one batch a step there is no accumulation in which to kill.
        inside = stop == "killed-in-accumulation"
        cells = [cell for cell in everything if cell[0] == stop and (cell[2] == "3" or not inside)]
        best = max(cells, key=lambda cell: len(left.intersection(combinations(enumerate(cell), 2))))
        chosen.append(best)
        left.difference_update(combinations(enumerate(best), 2))
    return chosen


CELLS = list(product(*CHOICES.values())) if os.environ.get("TRAIN_MATRIX") == "full" else cover()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run that was never stopped, without workers: their number must not show."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*training: str) -> Path:
        if training not in made:
            folder = tmp_path_factory.mktemp("straight")
            done = train("fit", *training, "data.num_workers=0", "run_dir=run", cwd=folder)
            assert done.code == 0, done.err
            made[training] = folder / "run"
        return made[training]

    return get


@pytest.mark.parametrize("cell", CELLS, ids="_".join)
def test_stop_and_resume_equals_going_straight_through(
    cell: Cell, straight: Callable[..., Path], tmp_path: Path
) -> None:
    stop, workers, accumulate, dtype, optimizer, ema = cell
    training = (
        *TRAINING,
        *CADENCE[accumulate],
        *OPTIMIZER[optimizer],
        f"loop.grad_accum_steps={accumulate}",
        f"precision={dtype}",
        *(EMA if ema == "on" else ()),
    )
    for interrupt in STOPS[stop][accumulate]:
        stopped = train(
            "fit", *training, f"data.num_workers={workers}", "run_dir=run", cwd=tmp_path, INTERRUPT=interrupt
        )
        assert stopped.code == (-9 if interrupt.startswith("SIGKILL") else 75), stopped.err
    resumed = train("fit", *training, f"data.num_workers={workers}", "run_dir=run", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert_same_run(tmp_path / "run", straight(*training))


def test_the_cover_holds_every_choice_and_kills_inside_an_accumulation() -> None:
    assert [set(values) for values in zip(*cover(), strict=True)] == [set(values) for values in CHOICES.values()]
    assert any(stop == "killed-in-accumulation" and accumulate == "3" for stop, _, accumulate, *_ in cover())
