"""The loop of the benchmark, by hand and in other trainers: `python scripts/bench/peers.py NAME` runs one of them.

Each trains the same network on the same batches with AdamW, and is otherwise configured as its users find it, or,
where it says barest, with everything off that can be switched off.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "project"))


def by_hand(*, fused: bool = False, collate: bool = False) -> None:
    """A plain loop."""
    import loop_parts
    import torch

    model = loop_parts.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)
    for batch in loop_parts.collating_loader() if collate else loop_parts.loader():
        optimizer.zero_grad(set_to_none=True)
        model(batch).backward()
        optimizer.step()


def lightning(**settings: Any) -> None:
    """Lightning; with `log`, the loss is logged as its users do."""
    import lightning as pl
    import loop_parts
    import torch

    logs = not settings

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = loop_parts.Model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch)
            if logs:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(max_steps=loop_parts.STEPS, accelerator="cpu", default_root_dir=folder, **settings)
        trainer.fit(Module(), loop_parts.loader())


def fabric() -> None:
    import loop_parts
    import torch
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = loop_parts.Model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for batch in fabric.setup_dataloaders(loop_parts.loader()):
        optimizer.zero_grad(set_to_none=True)
        fabric.backward(model(batch))
        optimizer.step()


def accelerate() -> None:
    import loop_parts
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = loop_parts.Model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), loop_parts.loader()
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def transformers(**settings: Any) -> None:
    """The Hugging Face Trainer."""
    import loop_parts
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(loop_parts.Model):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward((x, labels))}

    class Batches(loop_parts.Batches):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
            x, y = super().__getitem__(index)
            return {"x": x, "labels": y}

    class Ready(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(torch.utils.data.DataLoader(Batches(), batch_size=None))

    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=loop_parts.STEPS, per_device_train_batch_size=loop_parts.BATCH, use_cpu=True,
            **{"report_to": "tensorboard", "logging_steps": 50, **settings},
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        Ready(model=model, args=arguments, train_dataset=Batches(), optimizers=(optimizer, None)).train()


def ignite() -> None:
    import loop_parts
    import torch
    from ignite.engine import create_supervised_trainer

    net = loop_parts.Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    create_supervised_trainer(net, optimizer, torch.nn.functional.cross_entropy).run(loop_parts.loader(), max_epochs=1)


PEERS: Mapping[str, tuple[str | None, Callable[[], None]]] = {
    "bare": (None, by_hand),
    "bare, fused": (None, lambda: by_hand(fused=True)),
    "bare, collating": (None, lambda: by_hand(fused=True, collate=True)),
    "Lightning": ("lightning", lightning),
    "Lightning, barebones": ("lightning", lambda: lightning(barebones=True)),
    "Fabric": ("lightning", fabric),
    "accelerate": ("accelerate", accelerate),
    "HF Trainer": ("transformers", transformers),
    "HF Trainer, barest": (
        "transformers",
        lambda: transformers(report_to="none", disable_tqdm=True, logging_strategy="no", save_strategy="no"),
    ),
    "ignite": ("ignite", ignite),
}
"""By name: the package that it needs, and what runs it."""

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    PEERS[sys.argv[1]][1]()
