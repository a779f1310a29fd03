"""How each contender saves and resumes: the calls that its documentation names, and nothing around them.

A contender resumes the newest checkpoint as its documentation says. Where the documentation leaves that to the user,
the newest by its step is taken, and a folder only if it has the file that is written last.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from campaign.peers import task
from campaign.peers.task import EVERY, STEPS, announce, report_resume


class Contender(ABC):
    """One way to train with checkpoints.

    Attributes:
        name: its name in tables.
        packages: the distributions whose versions are named.
    """

    name: str
    packages: tuple[str, ...] = ("torch",)

    def prepare(self) -> None:  # noqa: B027 - most need nothing
        """Import what it needs, once for all runs."""

    @abstractmethod
    def run(self, folder: Path) -> None:
        """Train to the end, from the newest checkpoint in the folder if there is one."""

    @abstractmethod
    def newest(self, folder: Path) -> Path | None:
        """The file or folder that `run` would resume."""


class Loop(Contender):
    """A loop written by hand, as in the tutorials of PyTorch."""

    pattern = "step*"

    def run(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        points, model = task.Points(), task.Model()
        optimizer = torch.optim.AdamW(model.parameters())
        step = 0
        if (path := self.newest(folder)) is not None:
            step = self.load(path, model, optimizer)
            report_resume(step)
        while step < STEPS:
            optimizer.zero_grad()
            model(**task.batch_of(points, step))["loss"].backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                self.save(folder / f"step{step}", step, model, optimizer)
        self.finish()

    def newest(self, folder: Path) -> Path | None:
        steps = {int(match[1]): path for path in folder.glob(self.pattern) if (match := re.search(r"(\d+)", path.name))}
        return steps[max(steps)] if steps else None

    @abstractmethod
    def save(self, path: Path, step: int, model: Any, optimizer: Any) -> None:
        """Save, and announce the step once the call has returned."""

    @abstractmethod
    def load(self, path: Path, model: Any, optimizer: Any) -> int:
        """Load; returns the step."""

    def finish(self) -> None:
        """Wait for saves in the background."""


class TorchSave(Loop):
    name = "torch.save"
    pattern = "step*.pt"

    def save(self, path: Path, step: int, model: Any, optimizer: Any) -> None:
        self.write(_states(step, model, optimizer), path.with_suffix(".pt"))
        announce(step)

    def write(self, states: Any, path: Path) -> None:
        torch.save(states, path)

    def load(self, path: Path, model: Any, optimizer: Any) -> int:
        return _load_states(torch.load(path, weights_only=True), model, optimizer)


class TorchSaveRename(TorchSave):
    name = "torch.save, then rename"

    def write(self, states: Any, path: Path) -> None:
        torch.save(states, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)


class Safetensors(Loop):
    name = "safetensors"
    packages = ("safetensors", "torch")
    pattern = "step*.safetensors"

    def save(self, path: Path, step: int, model: Any, optimizer: Any) -> None:
        from safetensors.torch import save_file

        tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
        save_file(tensors, path.with_suffix(".safetensors"), metadata={"step": str(step)})
        announce(step)

    def load(self, path: Path, model: Any, optimizer: Any) -> int:
        from safetensors import safe_open

        weights: dict[str, Tensor] = {}
        states: dict[int, dict[str, Tensor]] = {}
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                kind, rest = key.split(".", 1)
                if kind == "model":
                    weights[rest] = file.get_tensor(key)
                else:
                    index, name = rest.split(".")
                    states.setdefault(int(index), {})[name] = file.get_tensor(key)
            step = int(file.metadata()["step"])
        optimizer_state = {"state": states, "param_groups": optimizer.state_dict()["param_groups"]}
        return _load_states({"step": step, "model": weights, "optimizer": optimizer_state}, model, optimizer)


class Dcp(Loop):
    """torch.distributed.checkpoint. Only folders with `.metadata`, which is written last, are resumed, as in
    torchtitan."""

    name = "DCP"
    pattern = "step*/.metadata"

    def run(self, folder: Path) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        super().run(folder)
        dist.destroy_process_group()

    def prepare(self) -> None:
        importlib.import_module("torch.distributed.checkpoint")

    def newest(self, folder: Path) -> Path | None:
        steps = {int(path.parent.name.removeprefix("step")): path.parent for path in folder.glob(self.pattern)}
        return steps[max(steps)] if steps else None

    def save(self, path: Path, step: int, model: Any, optimizer: Any) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.states(step, model, optimizer), checkpoint_id=path)
        announce(step)

    def load(self, path: Path, model: Any, optimizer: Any) -> int:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        states = self.states(0, model, optimizer)
        load(states, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        return int(states["step"])

    def states(self, step: int, model: Any, optimizer: Any) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, optimizer_state = get_state_dict(model, optimizer)
        return {"step": step, "model": weights, "optimizer": optimizer_state}


class AsyncDcp(Dcp):
    """Each save is announced when its future is done."""

    name = "DCP, async"
    saving: tuple[int, Future[Any]] | None = None

    def save(self, path: Path, step: int, model: Any, optimizer: Any) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.finish()
        answer: Any = async_save(self.states(step, model, optimizer), checkpoint_id=path)
        self.saving = step, getattr(answer, "upload_completion", answer)
        self.saving[1].add_done_callback(lambda future: None if future.exception() else announce(step))

    def finish(self) -> None:
        if self.saving is not None:
            self.saving[1].result()
            self.saving = None


class TorchCheckpointing(Loop):
    name = "torch_checkpointing"
    packages = ("torch-checkpointing", "torch")

    def prepare(self) -> None:
        importlib.import_module("torch_checkpointing")

    def run(self, folder: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = CheckpointManager.Config.with_sync_save()
        # Its direct writes are refused by ext4.
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = config.build()
        super().run(folder)
        self.manager.close()

    def save(self, path: Path, step: int, model: Any, optimizer: Any) -> None:
        self.manager.save(str(path), _states(step, model, optimizer))
        announce(step)

    def load(self, path: Path, model: Any, optimizer: Any) -> int:
        # Not into the state of a new optimizer, which is empty and would stay so.
        return _load_states(self.manager.load(str(path), into=dict.fromkeys(_STATES)), model, optimizer)


class Lightning(Contender):
    """A checkpoint at the end of each epoch, resumed by `ckpt_path="last"`."""

    name = "Lightning"
    packages = ("lightning", "torch")

    def prepare(self) -> None:
        importlib.import_module("lightning.pytorch")

    def run(self, folder: Path) -> None:
        import lightning.pytorch as pl
        from lightning.pytorch.callbacks import ModelCheckpoint
        from torch.utils.data import DataLoader

        class Module(pl.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = task.Model()
                self.announced = 0

            def training_step(self, batch: dict[str, Tensor]) -> Any:
                return self.model(**batch)["loss"]

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters())

            def on_train_start(self) -> None:
                self.announced = self.trainer.global_step
                report_resume(self.announced)

            def on_train_epoch_start(self) -> None:
                # The callback that saves has ended for the epoch before.
                self.announce_saved()

            def on_train_end(self) -> None:
                self.announce_saved()

            def announce_saved(self) -> None:
                if self.trainer.global_step > self.announced:
                    self.announced = self.trainer.global_step
                    announce(self.announced)

        saver = ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, save_last=True, save_on_train_epoch_end=True)
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=STEPS // EVERY, callbacks=[saver], logger=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(task.Points(), task.BATCH), ckpt_path="last")

    def newest(self, folder: Path) -> Path | None:
        path = folder / "last.ckpt"
        return path if path.exists() else None


class HuggingFace(Contender):
    name = "HF Trainer"
    packages = ("transformers", "torch")

    def prepare(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        importlib.import_module("transformers.trainer")

    def run(self, folder: Path) -> None:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        class Announcing(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                report_resume(state.global_step)

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                announce(state.global_step)

        folder.mkdir(parents=True, exist_ok=True)
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=STEPS, save_strategy="steps", save_steps=EVERY,
            per_device_train_batch_size=task.BATCH, remove_unused_columns=False, logging_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(task.Model(), arguments, train_dataset=task.Points(), callbacks=[Announcing()])
        newest = self.newest(folder)
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))

    def newest(self, folder: Path) -> Path | None:
        from transformers.trainer_utils import get_last_checkpoint

        newest = cast("Any", get_last_checkpoint)(str(folder)) if folder.is_dir() else None
        return None if newest is None else Path(newest)


class _StopOnCommit(logging.Handler):
    """Ends the process as `announce` does, when `train` has committed the step that is asked for."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(f"committed step {os.environ.get('FAULTS_STOP_AT')} "):
            os._exit(0)


class Train(Contender):
    """`train fit`, as its user calls it."""

    name = "train"
    packages = ("trainer-cli", "torch")
    overrides = (
        "model={_target_: campaign.peers.task.Model}", "model_call=kwargs",
        f"data={{_target_: campaign.peers.task.Data, batch_size: {task.BATCH}, num_workers: 0}}",
        "optimizer={_target_: torch.optim.AdamW}", "scheduler=null",
        f"loop.max_duration={STEPS}", "loop.log_interval=12", "loop.eval_interval=null",
        f"checkpoint.save_interval={EVERY}", "run_dir=run",
    )  # fmt: skip

    def prepare(self) -> None:
        importlib.import_module("trainer_cli.running.fitting")

    def run(self, folder: Path) -> None:
        from trainer_cli.commands.command_line import main
        from trainer_cli.loggers.base import SAVES

        SAVES.addHandler(_StopOnCommit())
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        code = main(["fit", "model=null", "data=null", "optimizer=null", *self.overrides])
        if code:
            raise SystemExit(code)

    def newest(self, folder: Path) -> Path | None:
        steps = {int(path.name.removeprefix("step")): path for path in folder.glob("run/checkpoints/step*")}
        return steps[max(steps)] if steps else None


_STATES = ("step", "model", "optimizer")


def _states(step: int, model: Any, optimizer: Any) -> dict[str, Any]:
    return dict(zip(_STATES, (step, model.state_dict(), optimizer.state_dict()), strict=True))


def _load_states(states: Any, model: Any, optimizer: Any) -> int:
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    return int(states["step"])


CONTENDERS: dict[str, Callable[[], Contender]] = {
    contender.name: contender
    for contender in (
        Train, TorchSave, TorchSaveRename, Safetensors, Dcp, AsyncDcp, TorchCheckpointing, Lightning, HuggingFace,
    )
}  # fmt: skip
