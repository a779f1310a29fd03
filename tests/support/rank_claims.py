"""What two gloo ranks say of their group, and save and load of a model that FSDP2 shards; each writes its answers to
FOLDER/RANK.json. One start for all claims, since each rank imports torch.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from faulty_disk import FaultyDisk
from small_parts import present
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import trainer_cli
from trainer_cli import Logging, Trainer, TrainingLoop
from trainer_cli.checkpoint.checkpointer import AsyncCheckpointer, CheckpointMetadata, SyncCheckpointer
from trainer_cli.dtensor import local_of, targets_of
from trainer_cli.errors import UserError
from trainer_cli.loads.options import WHOLE
from trainer_cli.parallel.distributed_group import find_default_group, join_processes
from trainer_cli.parallel.peer_errors import is_of_peer
from trainer_cli.parallel.process_group import ALONE, ProcessGroup
from trainer_cli.state.model_state import capture_model, fit_model
from trainer_cli.state.optimizer_state import capture_optimizer, fit_optimizer
from trainer_cli.storage.local import LocalStorage
from trainer_cli.strategies.fsdp import FSDP
from trainer_cli.strategies.strategy import DDP

MEGABYTE = 1 << 20
LARGE = 64 * MEGABYTE
"""Bytes of the large tensor, of which each rank has half."""


class Tiny(nn.Module):
    """Rows that two ranks cannot share evenly, tied weights, and statistics that each rank has for itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(5, 9, bias=False)
        self.norm = nn.BatchNorm1d(9)
        self.layers = nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 9))
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch: torch.Tensor) -> Any:
        hidden = self.layers(self.norm(self.embed(batch)))
        return (hidden - self.head(batch)).square().mean()


class Training:
    """A sharded model and its optimizer."""

    def __init__(self, seed: int) -> None:
        self.model: nn.Module = Tiny(seed)
        fully_shard(self.model.get_submodule("layers"))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def train(self, steps: int, group: ProcessGroup, seed: int) -> float:
        generator = torch.Generator().manual_seed(100 * seed + group.rank)
        loss = 0.0
        for _ in range(steps):
            self.optimizer.zero_grad()
            value = self.model(torch.randn(6, 5, generator=generator))
            value.backward()
            self.optimizer.step()
            loss = float(value)
        return loss

    def state(self, group: ProcessGroup) -> dict[str, Any]:
        return {
            "model": capture_model(self.model),
            "optimizer": capture_optimizer(self.model, self.optimizer),
            "progress": {"step": 3},
            "rng": {"torch": torch.arange(group.rank, group.rank + 3)},
        }

    def load(self, state: dict[str, Any]) -> list[str]:
        """What does not fit; if nothing, the state is loaded."""
        model, _ = fit_model(self.model, state["model"], WHOLE)
        optimizer = fit_optimizer(self.model, self.optimizer, state["optimizer"], WHOLE)
        faults = [*model.faults, *optimizer.faults]
        if not faults:
            model.load()
            optimizer.load()
        return faults

    @property
    def trained(self) -> list[torch.Tensor]:
        return list(self.model.parameters())


def flat(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The local tensors of a state, by path."""
    if isinstance(tree, dict):
        return {name: one for key, value in tree.items() for name, one in flat(value, f"{path}/{key}").items()}
    return {path: local_of(tree).clone()} if isinstance(tree, torch.Tensor) else {}


def whole(tree: Any) -> Any:
    """The state as one process would have it. Collective."""
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return tree.full_tensor() if hasattr(tree, "full_tensor") else tree


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def most_bytes(act: Any) -> int:
    """What a call adds at most to the memory of this process."""
    status = Path("/proc/self/status")

    def line(name: str) -> int:
        return int(next(one for one in status.read_text().splitlines() if one.startswith(name)).split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # The peak is from here on.
    before = line("VmRSS:")
    act()
    return line("VmHWM:") - before


def failure(save: Any) -> str:
    try:
        save()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refuse() -> None:
    raise UserError("no such file", where="here")


def exchanges(group: ProcessGroup) -> dict[str, Any]:
    """What the ranks tell one another."""
    later = torch.tensor([group.rank, 10.0])
    wait = group.start_sum(later)
    assert wait is not None
    wait.wait()
    ran: list[int] = []
    shared: list[float] = []

    class Follower:
        def add(self, number: float) -> int:
            shared.append(group.sum(torch.tensor([number])).item())
            return len(shared)

    follower = Follower()

    def decide() -> str:
        ran.append(group.rank)
        return "step500"

    def divide() -> None:
        with group.checking("setup"):
            1 / (1 - group.rank)

    with group.leading(follower) as leads:
        if leads:
            group.have_followers_call(follower.add, 1.0)
            ran.append(10 + follower.add(1.0))
    return {
        "rank": [group.rank, group.world_size, group.local_rank, group.is_main],
        "broadcast": group.broadcast({"run": f"of rank {group.rank}", "path": [1, None]}),
        "gather": group.gather(f"rank {group.rank}"),
        "gather_on_main": group.gather_on_main(f"rank {group.rank}"),
        "sum": group.sum(torch.tensor([1.0, float(group.rank)])).tolist(),
        "later": later.tolist(),
        "on_main": group.on_main(decide),
        "ran": ran,
        "shared": shared,
        "checked": failure(divide),
        "failed": failure(lambda: group.on_main(refuse)),
        "machines": [group.machines, machines_if_each_rank_has_its_own(group.rank)],
    }


def machines_if_each_rank_has_its_own(rank: int) -> int:
    name = socket.gethostname
    socket.gethostname = lambda: f"machine{rank}"
    try:
        return find_default_group().machines
    finally:
        socket.gethostname = name


def blocks(group: ProcessGroup) -> dict[str, list[Any]]:
    """What each rank raises by how a block ends on one of them: rank 0 in `leading`, rank 1 in `checking`; and what it
    gets in the next exchange, which is wrong if a rank has left out one, or made one too many."""

    def end(how: Any) -> None:
        if isinstance(how, BaseException):
            raise how

    def leave_leading(how: Any) -> None:
        for _ in range(1):
            with group.leading() as leads:
                if how == "return":
                    return
                if how == "break":
                    break
                if leads:
                    end(how)

    def leave_checking(how: Any) -> None:
        for _ in range(1):
            with group.checking("setup"):
                if group.rank == 1 and how == "return":
                    return
                if group.rank == 1 and how == "break":
                    break
                if group.rank == 1:
                    end(how)

    def outcome(leave: Any, how: Any) -> list[Any]:
        raised = None
        try:
            leave(how)
        except BaseException as error:
            raised = f"{type(error).__name__} {getattr(error, 'exit_code', '')}".strip()
        return [raised, group.gather(str(how))[0] == group.broadcast(str(how)) == str(how)]

    ends = [ValueError("bad"), UserError("bad"), StopIteration(), "return", "break"]
    return {
        **{f"leading {how!r}": outcome(leave_leading, how) for how in (*ends, KeyboardInterrupt(), SystemExit(7))},
        **{f"checking {how!r}": outcome(leave_checking, how) for how in ends},
    }


def saves(folder: Path, group: ProcessGroup) -> dict[str, Any]:
    """Saved while the training goes on, saved while it waits, and loaded into another model."""
    training = Training(0)
    training.train(3, group, 1)
    before = flat(training.state(group))
    background, waiting = AsyncCheckpointer(), SyncCheckpointer()
    for one in (background, waiting):
        one.join(group)
    facts = CheckpointMetadata(run_id="run", step=3)
    waiting.save(training.state(group), folder / "step3", metadata=facts, trained=training.trained)
    gathered = whole(training.state(group))
    if group.is_main:
        torch.save(gathered, folder / "gathered.pt")
    saving = present(background.save(training.state(group), folder / "async", metadata=facts, trained=training.trained))
    on = training.train(2, group, 2)
    saving.raise_failure()
    background.close()
    name = f"rank{group.rank}.safetensors"
    fresh = Training(1)
    fresh.train(1, group, 9)
    targets = targets_of(capture_model(fresh.model))
    state = waiting.read(folder / "async", targets=targets)
    faults = fresh.load(state)
    loaded = flat({**fresh.state(group), "rng": state["rng"]})
    return {
        "faults": faults,
        "bits": equal(loaded, before),
        "async is sync": (folder / "async" / name).read_bytes() == (folder / "step3" / name).read_bytes(),
        "goes on": fresh.train(2, group, 2) == on,
    }


class Divided(Training):
    """A GPT whose heads and perceptrons the ranks of a tensor group divide."""

    def __init__(self, seed: int, group: ProcessGroup) -> None:
        from trainer_cli.addons.text.gpt import GPT

        torch.manual_seed(seed)
        model = GPT(300, context=8, layers=1, heads=2, width=64, bias=True, fused_qkv=False)
        self.model = FSDP(group).place(model, torch.device("cpu"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, fused=True)
        tokens = torch.randint(0, 300, (2, 9))
        self.model((tokens[:, 1:], tokens[:, :-1]))["loss"].backward()
        self.optimizer.step()


def layouts(folder: Path, group: ProcessGroup) -> list[Any]:
    """One state saved with divided layers, loaded and saved sharded, and loaded and saved with divided layers again."""
    faults = []
    for number, tensor_size in enumerate((2, 1, 2)):
        group.divide_layers(tensor_size)
        training, checkpointer = Divided(number, group), SyncCheckpointer()
        checkpointer.join(group)
        if number:
            targets = targets_of(capture_model(training.model))
            faults += training.load(checkpointer.read(folder / "layouts" / str(number - 1), targets=targets))
        gathered = whole(training.state(group))
        checkpointer.save(training.state(group), folder / "layouts" / str(number), metadata=CheckpointMetadata(step=1))
        if group.is_main:
            torch.save({key: gathered[key] for key in ("model", "optimizer")}, folder / f"layout{number}.pt")
    group.divide_layers(1)
    return faults


def failures(folder: Path, group: ProcessGroup) -> dict[str, Any]:
    """The disk of rank 1 is full."""
    training = Training(0)
    disk = FaultyDisk(2 if group.rank == 1 else None, number=errno.ENOSPC, persistent=True)
    said = {}
    for name, make in (("sync", SyncCheckpointer), ("async", AsyncCheckpointer)):
        checkpointer = make(storage=lambda root: LocalStorage(root, disk=disk, run_id="run"))
        checkpointer.join(group)
        path = folder / f"failed-{name}" / "step4"

        def save(checkpointer: Any = checkpointer, path: Path = path) -> None:
            saving = checkpointer.save(training.state(group), path, metadata=CheckpointMetadata(step=4))
            if saving is not None:
                saving.raise_failure()

        said[name] = failure(save)
        checkpointer.close()
    return said


def default_group(folder: Path, group: ProcessGroup) -> dict[str, Any]:
    """Checkpointers that no group was given, in a program that has initialised torch's."""
    loaded: dict[str, Any] = {}
    for name, checkpointer in (("sync", SyncCheckpointer()), ("async", AsyncCheckpointer())):
        path = folder / "default" / name
        for number in range(2):
            # The second replaces the first, which an asynchronous save commits then; `close` commits the second.
            state = {"same": torch.full((3,), 5.0), "own": torch.full((2,), float(group.rank)), "number": number}
            checkpointer.save({**state, "rank": group.rank}, path)
        checkpointer.close()
        target: dict[str, Any] = {"own": torch.zeros(2), "rank": -1}
        checkpointer.load(path, target, strict=True)
        state = checkpointer.load(path)
        loaded[name] = [state["rank"], state["own"].tolist(), state["same"].tolist(), state["number"], sorted(state)]
        loaded[name] += [target["rank"], target["own"].tolist()]
    alone = SyncCheckpointer(group=ALONE)
    alone.save({"rank": group.rank}, folder / "default" / f"alone{group.rank}")
    loaded["alone"] = alone.load(folder / "default" / f"alone{group.rank}")["rank"]
    mixed = {"all": {"rank": group.rank, "weight": capture_model(Training(0).model)}}
    loaded["mixed"] = failure(lambda: SyncCheckpointer().save(mixed, folder / "default" / "mixed"))
    return loaded


class Halves(nn.Module):
    """Its body is frozen at first, and so are the statistics of the norm in it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8)), nn.Linear(8, 1)

    def forward(self, batch: list[torch.Tensor]) -> Any:
        return self.head(self.body(batch[0])).square().mean()


def frozen_at_first(group: ProcessGroup, max_lr: float | None) -> list[list[float]]:
    """The losses of a range test of the learning rate, if there is one, and the weights after a training under DDP."""
    trainer = Trainer(
        model=Halves, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1), freeze={"body.*": "1ep"},
        seed=0, strategy=DDP(group), device="cpu", loop=TrainingLoop(max_duration="2ep"),
        logging=Logging(console="off"),
    )  # fmt: skip
    data = TensorDataset(torch.linspace(-1, 1, 64).reshape(32, 2))
    # The ranks have other samples.
    own = DataLoader(TensorDataset(data.tensors[0] * (1 + group.rank)), 32)
    losses: list[float] = []
    if max_lr is not None:
        from trainer_cli.addons.auto.find import find_learning_rate

        losses = find_learning_rate(trainer, own, max_lr=max_lr, steps=40).losses
    trainer.fit(data)
    weights = (float(weight) for parameter in trainer.model.parameters() for weight in parameter.detach().flatten())
    return [losses, [*weights]]


def memory(folder: Path, group: ProcessGroup) -> dict[str, int]:
    """What a save and a load add to the peak of this rank's memory, in bytes."""
    layer = nn.Linear(LARGE // 4 // 1024, 1024, bias=False)
    model = nn.Sequential(layer)
    fully_shard(model)
    checkpointer = AsyncCheckpointer()
    checkpointer.join(group)
    state = {"model": capture_model(model)}
    facts = CheckpointMetadata(step=5)
    saved = most_bytes(lambda: present(checkpointer.save(state, folder / "large", metadata=facts)).raise_failure())
    checkpointer.close()
    return {
        "save": saved,
        "load": most_bytes(lambda: checkpointer.read(folder / "large", targets=targets_of(state["model"]))),
    }


def death(folder: Path, group: ProcessGroup) -> dict[str, Any]:
    """Rank 1 enters no further collective between its write and the gathering, and is then killed."""
    training = Training(0)
    checkpointer = AsyncCheckpointer(storage=lambda root: LocalStorage(root, run_id="run"))
    checkpointer.join(group)
    saving = present(checkpointer.save(training.state(group), folder / "step6", metadata=CheckpointMetadata(step=6)))
    checkpointer.drain()
    group.barrier()
    if group.rank == 1:
        while not (folder / "given-up").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    group.set_timeout(0.5)
    error = failure(saving.raise_failure)
    answers = {
        "timed out": "Timed out" in error and is_of_peer(RuntimeError(error)),
        "lost": str(group.lost_error("at step 17")).replace(socket.gethostname(), "HOST"),
        "first": [group.claim_failure(ZeroDivisionError("its own")), group.claim_failure(ValueError("later"))],
        "failure of rank 0": str(group.lost_error("at step 18")),
    }
    (folder / "given-up").touch()
    return answers


def main(folder: Path) -> None:
    group = join_processes(os.environ, timeout_s=500)
    answers: dict[str, Any] = exchanges(group)
    answers["blocks"] = blocks(group)
    answers |= saves(folder, group)
    # Without those that need an add-on that was deleted.
    if "GPT" in trainer_cli.__all__:
        answers["layouts"] = layouts(folder, group)
    answers["default group"] = default_group(folder, group)
    if "find_learning_rate" in trainer_cli.__all__:
        answers["frozen at first"] = [frozen_at_first(group, max_lr) for max_lr in (None, 1e-3, 1e3)]
    answers["memory"] = memory(folder, group)
    answers["failed on a full disk"] = failures(folder, group)
    (folder / f"{group.rank}.json").write_text(json.dumps(answers))
    answers |= death(folder, group)
    (folder / f"{group.rank}.json").write_text(json.dumps(answers))
    os._exit(0)  # Without the other rank no group can be left.


if __name__ == "__main__":
    main(Path(sys.argv[1]))
