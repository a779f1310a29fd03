"""Trains several times on one start of the ranks: `python fits.py JOBS`, a JSON list of lists of overrides, or of
`["damage", FILE]`, which changes a bit of a file, or `["lose", FOLDER]`, which deletes it. In a list that begins with
"machines" each rank has a current folder of its own.

Rank 0 prints each exit code and how the fit failed. Without torchrun's variables it trains in this process alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

import torch
from faulty_disk import FaultyDisk
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from trainer_cli import Callback, Digits, TrainStep
from trainer_cli.dtensor import whole_of
from trainer_cli.parallel import same
from trainer_cli.parallel.distributed_group import join_processes
from trainer_cli.processes.fit import compose_fit
from trainer_cli.running.fitting import fit


class Stopping(Callback):
    """Asks for something on one rank only, at one step."""

    def __init__(self, rank: int, step: int, ask: str) -> None:
        self.rank, self.step, self.ask = rank, step, ask

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Not at the first of several batches of the next step either: a run that was stopped begins with it.
        ended = trainer.progress.step == trainer.step.step_idx + 1
        if not ended or trainer.progress.step != self.step or trainer.strategy.group.rank != self.rank:
            return
        if self.ask == "stop":
            trainer.stop(f"asked for by rank {self.rank}", finished=False)
        elif self.ask == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.ask == "nudge":
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1
        elif self.ask == "log":
            trainer.log_metrics({"seen": self.step})
        elif self.ask == "evaluate":
            trainer.ask_for_evaluation()
        elif self.ask == "roll_back" and trainer.progress.passed_over == 0:
            trainer.ask_to_roll_back()
        elif self.ask == "fail":
            raise ZeroDivisionError("the callback's own")
        elif self.ask in ("signal", "kill"):
            os.kill(int(os.environ["LAUNCHER"]), signal.SIGTERM if self.ask == "signal" else signal.SIGKILL)


class Plant(Callback):
    """A batch of one rank is NaN, by its number in the epoch, or its loss alone (`how`: input or loss). Where the step
    is skipped, buffers are as before it."""

    def __init__(self, batch: int, rank: int = 1, how: str = "input") -> None:
        self.batch, self.rank, self.how = batch, rank, how

    def on_train_step_start(self, trainer: Any, model: Any, batch: Any) -> None:
        group = trainer.strategy.group
        self.before = [one.clone() for one in model.buffers()] if trainer.progress.batch == self.batch else None
        self.hits = self.before is not None and group.rank == min(self.rank, group.world_size - 1)
        if self.hits and self.how == "input":
            batch[0].fill_(float("nan"))

    def on_before_backward(self, trainer: Any, model: Any, loss: Any) -> None:
        if self.hits and self.how == "loss":
            loss.data.fill_(float("nan"))

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.before is not None and trainer.callbacks["finite"].policy == "skip":
            assert all(torch.equal(one, before) for one, before in zip(model.buffers(), self.before, strict=True))


class Sums(Callback):
    """Prints sums of the weights and of the places that masks keep, at the end, and what ConfusionMatrix counted. What
    it logs of an evaluation differs between ranks, and no decision depends on that."""

    def run_validation(self, trainer: Any, is_last: bool) -> None:
        trainer.log_metrics({"own/rank": trainer.strategy.group.rank})

    def on_after_evaluation(self, trainer: Any, metrics: Any) -> None:
        assert metrics["own/rank"] == 0

    def on_fit_end(self, trainer: Any, loop: Any) -> None:
        weights = sum(float(whole_of(one.detach()).double().sum()) for one in trainer.model.parameters())
        sparsity, confusion = (trainer.callbacks.get(name) for name in ("sparsity", "confusion_matrix"))
        masks = [] if sparsity is None else sparsity.state_dict()["masks"].values()
        print(f"SUMS {weights!r} {sum(int(whole_of(mask).flatten().nonzero().sum()) for mask in masks)}", flush=True)
        if confusion is not None:
            print(f"COUNTS {confusion.counts.sum(1).tolist()}", flush=True)


class Outputs(Callback):
    """Writes what each rank predicts at the end. The last samples are fewer than the ranks."""

    def on_fit_end(self, trainer: Any, loop: Any) -> None:
        samples = Digits().val
        rows = trainer.predict([samples[index] for index in range(65)], outputs="logits")
        text = json.dumps([row["logits"].tolist() for row in rows])
        (trainer.run_dir / f"outputs{trainer.strategy.group.rank}.json").write_text(text)


class Count:
    """A metric that knows nothing of other processes."""

    def update(self, predictions: Any, targets: Any) -> None:
        """Count nothing."""

    def compute(self) -> float:
        return 0.0

    def reset(self) -> None:
        """Nothing was counted."""


class Striking(Callback):
    """Sends the process of one rank a signal, or raises (`number` is raise), once in all attempts: `at` load, start,
    step, save or evaluation."""

    def __init__(self, rank: int, at: str, number: str = "SIGKILL") -> None:
        self.rank, self.at, self.number = rank, at, number

    def _strike(self, trainer: Any, at: str) -> None:
        if at == self.at and trainer.strategy.group.rank == self.rank and not Path("struck").exists():
            Path("struck").touch()
            if self.number == "raise":
                raise RuntimeError(f"rank {self.rank} was struck")
            os.kill(os.getpid(), signal.Signals[self.number])

    def on_before_load_checkpoint(self, trainer: Any, path: Path) -> None:
        self._strike(trainer, "load")

    def on_fit_start(self, trainer: Any, *loaders: Any) -> None:
        self._strike(trainer, "start")

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.step in (11, 12) and self.at == "step":
            # So that the save of step 10 is committed by then, however busy the machine is.
            trainer.checkpoint.drain()
        if trainer.progress.step == 13:
            self._strike(trainer, "step")
        if trainer.progress.step == 19 and self.at == "save" and not Path("struck").exists():
            trainer.checkpoint.drain()
            trainer.checkpoint.storage.disk = _StrikingDisk(lambda: self._strike(trainer, "save"))

    def on_validate_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.step == 20 and batch_idx == 3:
            self._strike(trainer, "evaluation")


class _StrikingDisk(FaultyDisk):
    """Writes half of what it is given before it strikes."""

    def __init__(self, strike: Any) -> None:
        super().__init__()
        self._strike = strike

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        written = super().write(fd, data[: max(1, len(data) // 2)], offset)
        self._strike()
        return written


class FullDisk(Callback):
    """On one rank the disk takes no byte of a checkpoint in the next two steps."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.group.rank == self.rank and trainer.progress.step in (self.step, self.step + 2):
            full = trainer.progress.step == self.step
            trainer.checkpoint.drain()
            trainer.checkpoint.storage.disk = FaultyDisk(1 if full else None, number=ENOSPC, persistent=True)


class UnsavedState(Callback):
    """On one rank, what it adds to a checkpoint cannot be made at one step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_save_checkpoint(self, trainer: Any, state: dict[str, Any]) -> None:
        if trainer.strategy.group.rank == self.rank and trainer.progress.step == self.step:
            raise ZeroDivisionError("the callback's own")


def _own(epoch: int, rank: int) -> list[int]:
    """The samples of a rank, of 18 + 24 for each other rank."""
    order = torch.randperm(
        18 + 24 * (torch.distributed.get_world_size() - 1), generator=torch.Generator().manual_seed(epoch)
    ).tolist()
    return order[:18] if rank == 0 else order[24 * rank - 6 :][:24]


class Lengths(DistributedSampler[int]):
    """Rank 0 has 18 samples, each other rank 24."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, shuffle=True)

    def __iter__(self) -> Iterator[int]:
        return iter(_own(self.epoch, self.rank))

    def __len__(self) -> int:
        return 24 if self.rank else 18


class Stream(IterableDataset[torch.Tensor]):
    """As `Lengths`, of a length that is not known."""

    per_rank = True

    def __init__(self, samples: torch.Tensor) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in _own(self.epoch, torch.distributed.get_rank()):
            yield self.samples[index] + torch.rand(()) / 10


class OwnParts:
    """Loaders of which each rank has samples of its own, rank 0 fewer: `kind` is sampler, stream or iterable."""

    def __init__(self, kind: str) -> None:
        samples = torch.randn(
            18 + 24 * (torch.distributed.get_world_size() - 1), 3, generator=torch.Generator().manual_seed(0)
        )
        self.train: Any = Stream(samples)
        self.val: Any = TensorDataset(samples)
        if kind == "sampler":
            self.train = DataLoader(TensorDataset(samples), 4, sampler=Lengths(samples))
        elif kind == "iterable":
            self.train = DataLoader(self.train, 4)
        if kind != "stream":
            self.val = DataLoader(self.val, 4, sampler=Lengths(samples))


class ByEpoch(Dataset[torch.Tensor]):
    """As many samples as the epoch says."""

    lengths = (8, 24, 8, 40)

    def __init__(self) -> None:
        self.length, self.samples = 8, torch.randn(40, 3, generator=torch.Generator().manual_seed(0))

    def set_epoch(self, epoch: int) -> None:
        self.length = self.lengths[epoch % 4]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index]


class Growing:
    """Data with epochs of several lengths."""

    def __init__(self) -> None:
        self.train, self.val = ByEpoch(), None


class Square(torch.nn.Module):
    """The square of a linear function, and with `spare` a parameter that gets no gradient."""

    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.spare = torch.nn.Parameter(torch.ones(2)) if spare else None

    def tensor_parallel_plan(self, tensor_size: int) -> dict[str, str]:
        return {"linear": "colwise_gather_output"}

    def forward(self, batch: Any) -> Any:
        (batch,) = batch if isinstance(batch, list) else (batch,)
        return self.linear(batch).square().mean()


class Counting:
    """Tokens that count on, and are their own labels."""

    def __init__(self) -> None:
        self.train = [{"input_ids": row, "labels": row} for row in (torch.arange(64 * 8) % 48).reshape(64, 8)]


class OwnStep(TrainStep):
    """Calls the model, not `forward`."""

    def train_batch(self, batch: Any) -> Any:
        loss = self.model(batch)["loss"]
        self.backward(loss)
        return loss


class SeveralLosses(TrainStep):
    """Calls `backward` for two losses of a batch; with `apart` for the second without a forward of its own, with
    `holds` times a parameter of the step."""

    def __init__(self, *, apart: bool = False, holds: bool = False) -> None:
        self.apart = apart
        self.scale = torch.nn.Parameter(torch.ones(1)) if holds else torch.ones(1)

    def train_batch(self, batch: Any) -> Any:
        outputs = self.forward(batch)
        self.backward(outputs["loss"] * self.scale.sum(), retain_graph=True)
        again = outputs if self.apart else self.forward(batch)
        self.backward(again["loss"] * 0.5 + (self.scale.sum() - 2) ** 2)
        return outputs


class Uneven(torch.nn.Module):
    """A linear model whose batches weigh as much as their labels: no two ranks have the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 10)

    def forward(self, batch: Any) -> dict[str, Any]:
        images, labels = batch
        losses = torch.nn.functional.cross_entropy(self.linear(images.flatten(1)), labels, reduction="none")
        weight = labels.sum()
        return {"loss": (losses * labels).sum() / weight.clamp(min=1), "weight": weight, "tokens": weight}


class Hungry(Uneven):
    """Has memory for 8 samples on rank 1, and for 16 on each other."""

    def forward(self, batch: Any) -> dict[str, Any]:
        if len(batch[0]) > (8 if os.environ["RANK"] == "1" else 16):
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(batch)


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def main(jobs: list[list[str]]) -> None:
    torch.set_num_threads(1)
    group = join_processes(os.environ, timeout_s=500)
    ends = []
    for overrides in jobs:
        try:
            if overrides[0] == "damage":
                group.on_main(partial(_damage, Path(overrides[1])))
                ends.append("damaged")
                continue
            if overrides[0] == "apart":
                # Rank 1 sees another run directory from now on.
                same.APPEARS_IN_S = 0.1
                group.on_main(lambda: Path("apart").mkdir())
                if not group.is_main:
                    os.chdir("apart")
                overrides = overrides[1:]
            if overrides[0] == "lose":
                group.on_main(partial(shutil.rmtree, overrides[1]))
                ends.append("lost")
                continue
            if overrides[0] == "machines":
                # Each rank is on a machine of its own, which sees no folder of the other.
                group.machines = group.world_size
                Path(f"machine{group.rank}").mkdir(exist_ok=True)
                os.chdir(f"machine{group.rank}")
                overrides = overrides[1:]
            ends.append(str(int(fit(group.on_main(partial(compose_fit, overrides)), group=group))))
        except Exception as error:
            ends.append(f"{type(error).__name__}: {error}")
        if group.machines > 1:
            os.chdir("..")
            group.machines = 1
    sys.stdout.flush()
    print("\nENDS", json.dumps(ends))
    group.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
