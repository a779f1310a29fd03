"""Steps of a GPT-2 of 124 M parameters on one GPU in bf16: by hand, by the trainer, and while it saves."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from settings import Settings
from table import Column, Row, Table
from timing import interleaved, say
from trainer_cli import CheckpointerCallback, Precision, Trainer, TrainingLoop
from trainer_cli.data.loader import Loader
from trainer_cli.parallel.distributed_group import join_processes
from trainer_cli.strategies.fsdp import FSDP
from trainer_cli.strategies.strategy import Strategy
from trainer_cli.trainer.hooks import Callback
from views import Batch, Views

BASE, SAVES = "by hand", 4
"""A run with saves makes so many while it is measured."""


@dataclass(frozen=True, slots=True)
class Size:
    """A GPT and its batches."""

    vocab_size: int = 50304
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    batch: int = 16
    warm: int = 10
    steps: int = 60

    def model(self) -> torch.nn.Module:
        from trainer_cli.addons.text.gpt import GPT

        model: torch.nn.Module = GPT(self.vocab_size, self.context, self.layers, self.heads, self.width)
        return model

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.context

    def flops(self, parameters: int) -> float:
        """Of a step, forward and backward, as PaLM's appendix B counts them (Chowdhery et al., 2022)."""
        return self.tokens * (6.0 * parameters + 12.0 * self.layers * self.width * self.context)


class Tokens(Views):
    """Random tokens, and those after them."""

    def __init__(self, size: Size) -> None:
        super().__init__(size.batch * (size.warm + size.steps))
        self.rows = torch.randint(size.vocab_size, (len(self), size.context + 1))

    def batch(self, part: slice) -> Batch:
        rows = self.rows[part]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Clock(Callback):
    """Seconds from the end of the warm-up to the last step's end, with the device waited for at both."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self._at, self._device = (size.warm, size.warm + size.steps), device
        self.began = self.seconds = 0.0

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def step(self, number: int) -> None:
        if number == self._at[0]:
            self.began = self.now()
        elif number == self._at[1]:
            self.seconds = self.now() - self.began

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.step(trainer.progress.step)


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def _by_hand(size: Size, loader: Loader, clock: Clock, device: torch.device, *, compiled: bool = False) -> None:
    torch.manual_seed(0)
    model = size.model().to(device)
    forward: Callable[..., Any] = torch.compile(model) if compiled else model
    optimizer = _optimizer(model)
    for number, (tokens, targets) in enumerate(loader.iterate(0), 1):
        batch = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step(number)


def _by_trainer(
    size: Size,
    loader: Loader,
    clock: Clock,
    device: torch.device,
    *,
    compiled: bool = False,
    folder: Path | None = None,
    save_async: bool = True,
    strategy: Callable[[], Strategy] | None = None,
) -> None:
    saves = None
    if folder is not None:
        saves = CheckpointerCallback(
            folder / f"saves-{time.time_ns()}",
            save_interval=None,
            ephemeral_save_interval=(size.warm + size.steps) // (SAVES + 1),
            save_async=save_async,
            save_final=False,
            pre_train_checkpoint=False,
        )
    Trainer(
        model=size.model,
        optimizer=_optimizer,
        precision=Precision(dtype="bf16"),
        compile={} if compiled else None,
        loop=TrainingLoop(max_duration=size.warm + size.steps, eval_interval=None, log_interval=20),
        checkpoint=saves,
        callbacks=[clock],
        strategy=None if strategy is None else strategy(),
        seed=0,
        device=device.type,
    ).fit(loader)


def contenders(folder: Path) -> dict[str, Callable[..., None]]:
    """By name: what trains."""
    return {
        BASE: _by_hand,
        "trainer": _by_trainer,
        "trainer, saves behind": partial(_by_trainer, folder=folder),
        "trainer, saves at once": partial(_by_trainer, folder=folder, save_async=False),
        "trainer, FSDP2": partial(_by_trainer, strategy=lambda: FSDP(_group())),
        f"{BASE}, compiled": partial(_by_hand, compiled=True),
        "trainer, compiled": partial(_by_trainer, compiled=True),
    }


def _group() -> Any:
    """This process alone, as FSDP needs it."""
    global _joined
    if _joined is None:
        _joined = join_processes(os.environ, alone_too=True)
    return _joined


_joined: Any = None


def _peak_tflops(device: str) -> float | None:
    from trainer_cli.addons.inspect.profiling import peak_tflops

    return peak_tflops(device)


def measured(train: Callable[..., None], size: Size, device: torch.device) -> Mapping[str, float]:
    """Milliseconds a step, tokens a second and the share of the chip's peak, in per cent."""
    clock = Clock(size, device)
    train(size, Loader(Tokens(size), size.batch, shuffle=False, seed=0), clock, device)
    seconds = clock.seconds / size.steps
    parameters = sum(parameter.numel() for parameter in size.model().parameters())
    found = {"step": seconds * 1e3, "tokens": size.tokens / seconds}
    if device.type == "cuda" and (peak := _peak_tflops(torch.cuda.get_device_name(device))) is not None:
        found["MFU"] = size.flops(parameters) / seconds / peak / 1e12 * 100
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def measure(settings: Settings) -> list[Table]:
    """One table; none without a CUDA device."""
    if not torch.cuda.is_available():
        say("gpu is skipped: there is no CUDA device")
        return []
    size = settings.pick(smoke=Size(warm=1, steps=2), quick=Size(steps=20), whole=Size())
    return [table(size, torch.device("cuda"), settings)]


def table(size: Size, device: torch.device, settings: Settings, names: Sequence[str] = ()) -> Table:
    """The steps of those contenders, or of all."""
    every = contenders(settings.scratch)
    measures = {name: partial(measured, every[name], size, device) for name in names or every}
    samples, skipped = interleaved(measures, settings.rounds_or(1, 5), warm=settings.warm, needed=[BASE])
    rows = [
        Row(name, found, base=f"{BASE}, compiled" if "compiled" in name else BASE) for name, found in samples.items()
    ]
    columns = [Column("step", "ms", 2, resolution=0.1), Column("tokens", "1/s", 0, ratio=False)]
    if "MFU" in rows[0].samples:
        columns.append(Column("MFU", "%", 1, ratio=False))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return Table(
        "gpu", f"A step of a GPT of {size.layers} layers in bf16 on {where}", BASE, columns, rows,
        {"steps": size.steps, "batch": size.batch, "context": size.context}, skipped,
        [
            f"Fused AdamW; with saves, {SAVES} whole checkpoints are written meanwhile. MFU: model FLOPs by the "
            "formula of PaLM's appendix B, of the dense 16-bit peak."
        ],
    )  # fmt: skip
