"""What a start, a save, a load and a sweep cost as histories, folders, models, texts and sweeps grow: with exponents.

python scripts/bench/growth.py tensors COUNT FOLDER | text BYTES FOLDER | documents BYTES FOLDER
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import own_checkpointers
from killed import Stamp, fit
from replayed import TRAIN
from settings import Settings
from table import Column, Row, Table
from timing import asked, children_processor, peak_mb, run, say, seconds

SMALL = ("model.millions=0.07", "checkpoint.save_interval=null", "checkpoint.save_final=true")
MORE_STEPS = 10


def measure(settings: Settings) -> list[Table]:
    """One table with a plot: a line for each thing that grows."""
    kinds: Mapping[str, tuple[Callable[[Settings, list[int]], Iterator[Row]], list[int]]] = {
        "records": (_records, settings.pick(smoke=[20], quick=[500, 2000, 8000], whole=[2000, 8000, 32_000])),
        "checkpoints": (_checkpoints, settings.pick(smoke=[3], quick=[30, 60, 120], whole=[100, 300, 900])),
        "parameters": (_tensors, settings.pick(smoke=[10], quick=[100, 400, 1600], whole=[500, 2000, 8000])),
        "fixed steps": (_fixed_steps, settings.pick(smoke=[10], quick=[100, 1000, 5000], whole=[200, 2000, 20_000])),
        "MB of text": (_texts, settings.pick(smoke=[1], quick=[1, 2, 4], whole=[4, 32, 256])),
        "jobs": (_jobs, settings.pick(smoke=[2], quick=[2, 3, 4], whole=[2, 6, 18])),
    }
    rows = [row for grow, sizes in kinds.values() for row in grow(settings, sizes)]
    columns = [
        Column("time", "s", 3, resolution=0.1, ratio=False),
        Column("processor", "s", 3, resolution=0.1, ratio=False),
        Column("memory", "MB", 0, resolution=20.0, ratio=False),
    ]
    notes = [
        "Whole commands, except the rows of a single save, of parameters and of text. Records: a resume with that many "
        f"logged, to its first step, or {MORE_STEPS} steps with the end of the run. Checkpoints: a save, or a start, "
        "with that many kept. Parameters have 64 numbers each: a resume by the Trainer, "
        "beside torch.load and load_state_dict. `memory`: the peak of the process. Single measurements; an exponent is "
        "that of the whole figure, in which a constant part, such as `import torch`, is included."
    ]
    sizes = {kind: counts for kind, (_, counts) in kinds.items()}
    return [Table("growth", "Costs that should not grow", "", columns, rows, sizes, {}, notes, x_label="how many")]


def _row(kind: str, count: int, unit: str, samples: Mapping[str, float]) -> Row:
    say(f"{kind}, {count:,} {unit}: {samples['time']:.3g} s")
    return Row(
        f"{kind}, {count:,} {unit}", {name: [value] for name, value in samples.items()}, series=kind, x=float(count)
    )


def _records(settings: Settings, counts: list[int]) -> Iterator[Row]:
    for count in counts:
        with tempfile.TemporaryDirectory(dir=settings.scratch) as folder:
            options = (*SMALL, "loop.log_interval=1", "checkpoint.ephemeral_save_interval=null")
            fit(Path(folder), (*options, f"loop.max_duration={count}"))
            stamps, processor, took = _again(folder, (*options, f"loop.max_duration={count + MORE_STEPS}"))
        first = next(stamp.at for stamp in stamps if stamp.what == "stepped") - took[0]
        yield _row("resume after records", count, "records", {"time": first, "processor": processor})
        yield _row("end after records", count, "records", {"time": took[1] - took[0] - first, "memory": _peak(stamps)})


def _checkpoints(settings: Settings, counts: list[int]) -> Iterator[Row]:
    """A run that keeps all checkpoints, and goes on from count to count."""
    options = (
        *SMALL, "checkpoint.save_interval=1", "checkpoint.remove=never", "checkpoint.save_async=false",
        "checkpoint.ephemeral_save_interval=null",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=settings.scratch) as folder:
        for count in counts:
            stamps = fit(Path(folder), (*options, f"loop.max_duration={count}"))
            pace = next(stamp.seconds for stamp in reversed(stamps) if stamp.what == "ended")
            yield _row("save beside checkpoints", count, "checkpoints", {"time": pace})
            stamps, processor, took = _again(folder, (*options, f"loop.max_duration={count + 1}"))
            first = next(stamp.at for stamp in stamps if stamp.what == "stepped") - took[0]
            yield _row("start beside checkpoints", count, "checkpoints", {"time": first, "processor": processor})


def _peak(stamps: Sequence[Stamp]) -> float:
    return next(stamp.peak_mb for stamp in reversed(stamps) if stamp.what == "ended")


def _again(folder: str, overrides: Sequence[str]) -> tuple[list[Stamp], float, tuple[float, float]]:
    """The same run once more: its stamps, processor seconds, and when the command began and ended."""
    found: dict[str, float] = {}
    began = time.time()
    with children_processor(found, "processor"):
        stamps = fit(Path(folder), overrides)
    return [stamp for stamp in stamps if stamp.at > began], found["processor"], (began, time.time())


def _tensors(settings: Settings, counts: list[int]) -> Iterator[Row]:
    for count in counts:
        found = _in_process(settings, "tensors", count)
        for kind, took in found.items():
            yield _row(kind, count, "parameters", took)


def _fixed_steps(settings: Settings, counts: list[int]) -> Iterator[Row]:
    for count in counts:
        found: dict[str, float] = {}
        with children_processor(found, "processor"), tempfile.TemporaryDirectory(dir=settings.scratch) as folder:
            # In a file: the system takes no argument above 128 KiB, and Hydra's grammar reads a list in quadratic time.
            experiment = Path(folder) / "experiment" / "many_steps.yaml"
            experiment.parent.mkdir()
            steps = "".join(f"    - {step}\n" for step in range(1, count + 1))
            experiment.write_text(f"# @package _global_\ncheckpoint:\n  fixed_steps:\n{steps}")
            command = (*TRAIN, "config", "--config-dir", folder, "many_steps")
            found["time"] = seconds(partial(run, command, cwd=folder))
        yield _row("config with fixed steps", count, "fixed steps", found)


def _texts(settings: Settings, counts: list[int]) -> Iterator[Row]:
    for count in counts:
        for kind in ("text", "documents"):
            yield _row(f"data={kind}", count, "MB of text", _in_process(settings, kind, count)[kind])


def _jobs(settings: Settings, counts: list[int]) -> Iterator[Row]:
    for count in counts:
        found: dict[str, float] = {}
        seeds = ",".join(str(seed) for seed in range(count))
        with children_processor(found, "processor"), tempfile.TemporaryDirectory(dir=settings.scratch) as folder:
            found["time"] = seconds(
                partial(fit, Path(folder), (*SMALL, "loop.max_duration=5", "--multirun", f"seed={seeds}"))
            )
        yield _row("sweep of jobs", count, "jobs", found)


def _in_process(settings: Settings, kind: str, count: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(dir=settings.scratch) as folder:
        answer: dict[str, dict[str, float]] = asked((sys.executable, __file__, kind, str(count), folder))
        return answer


def tensors(count: int, folder: Path) -> dict[str, dict[str, float]]:
    """A resume by the Trainer of a model with so many parameters, beside torch's own load of the same."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from trainer_cli import Logging, Trainer, TrainingLoop

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(torch.rand(64)) for _ in range(count)])

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return torch.stack([*self.parts]).mul(batch).sum()

    def trainer(steps: int) -> Trainer:
        return Trainer(
            model=Many, optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
            checkpoint=own_checkpointers.checkpoint_callback(folder / "checkpoints", asynchronous=False),
            loop=TrainingLoop(max_duration=steps, eval_interval=None), seed=0, device="cpu",
            logging=Logging(level="error", console="off"),
        )  # fmt: skip

    def by_torch() -> None:
        read = torch.load(folder / "torch.pt", weights_only=True)
        model = Many()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model.load_state_dict(read["model"])
        optimizer.load_state_dict(read["optimizer"])

    batches: Any = DataLoader(cast("Any", torch.ones(2, 64)), batch_size=None)
    first = trainer(1)
    first.fit(batches, ckpt_path=None)
    optimizer = next(iter(first.optimizers.values()))
    torch.save({"model": first.model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "torch.pt")
    saved = max((folder / "checkpoints").glob("step*"))
    second = trainer(2)
    resume = _timed(lambda: second.fit(batches, ckpt_path=saved))
    return {"resume of parameters": resume, "torch.load of parameters": _timed(by_torch)}


def text(kind: str, megabytes: int, folder: Path) -> dict[str, dict[str, float]]:
    """What a text of so many megabytes takes until its first sample."""
    from trainer_cli.addons.text.text import Documents, Text

    paragraph = ("Some words of a text that is long. " * 8 + "\n\n").encode()
    file = folder / "text.txt"
    with file.open("wb") as handle:
        for _ in range(megabytes * 1_000_000 // len(paragraph)):
            handle.write(paragraph)
    data_class = {"text": Text, "documents": Documents}[kind]
    found = _timed(lambda: data_class(str(file)).train[0])
    return {kind: {**found, "memory": peak_mb()}}


def _timed(work: Callable[[], object]) -> dict[str, float]:
    used = time.process_time()
    return {"time": seconds(work), "processor": time.process_time() - used}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    kind, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    print(json.dumps(tensors(count, folder) if kind == "tensors" else text(kind, count, folder)))
