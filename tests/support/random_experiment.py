"""Random experiments of shipped options and small own parts: each seed makes the same one again."""

from __future__ import annotations

import random
from typing import Any

import yaml

import trainer_cli

# Their add-ons may have been deleted.
HAS_LORA, HAS_SPARSITY = "lora" in trainer_cli.__all__, "GMP" in trainer_cli.__all__
PARTS = '''
"""Small parts of experiments: models, data, training steps and callbacks."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

from trainer_cli import Callback, TrainStep

NORMS = {
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
    "group": lambda width: nn.GroupNorm(2, width),
    "none": lambda width: nn.Identity(),
}


class Net(nn.Module):
    """A body and a head over four inputs; the layers of the body may share one weight."""

    def __init__(self, width=8, norm="none", dropout=0.0, tied=False, parametrized=None):
        super().__init__()
        first, second, third = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, width)
        if tied:
            third.weight = second.weight
        if parametrized is not None:
            first = getattr(parametrizations, parametrized)(first)
        body = [part for layer in (first, second, third) for part in (layer, NORMS[norm](width), nn.Tanh())]
        self.body, self.dropout, self.head = nn.Sequential(*body), nn.Dropout(dropout), nn.Linear(width, 1)

    def forward(self, batch):
        x, y = batch
        error = self.head(self.dropout(self.body(x))).squeeze(1) - y
        return {"loss": (error**2).mean(), "accuracy": (error.abs() < 0.5).float().mean()}


def draw(generator=None):
    x = torch.rand(4, generator=generator)
    return x, x.sum() + x[0] * x[1]


class Points(torch.utils.data.Dataset):
    """Samples with noise of their own at each visit."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x, y = draw(torch.Generator().manual_seed(index))
        return x + 0.1 * torch.rand(4), y


class Stream(torch.utils.data.IterableDataset):
    """Samples without a length, shared by the workers."""

    position = 0

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first + step * self.position, self.size, step):
            self.count()
            yield draw(torch.Generator().manual_seed(index))
        self.position = 0

    def count(self):
        """Without a state it begins anew."""


class StatefulStream(Stream):
    """The same with a state."""

    def count(self):
        self.position += 1

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Data:
    def __init__(self, kind="points", size=100, shuffle=True):
        val = Points(30)
        if kind == "loader":
            self.train = torch.utils.data.DataLoader(Points(size), batch_size=8, shuffle=shuffle)
            self.val = torch.utils.data.DataLoader(val, batch_size=8)
        else:
            self.train = {"points": Points, "stream": Stream, "stateful": StatefulStream}[kind](size)
            self.val = {"val": val, "other": Points(17)} if kind == "points" and not shuffle else val


class Alternating(TrainStep):
    """The head learns first, then the body, with the head frozen meanwhile."""

    def train_batch(self, batch):
        losses = []
        for name, other in (("head", self.model.body), ("body", self.model.head)):
            other.requires_grad_(False)
            outputs = self.forward(batch)
            self.backward(outputs["loss"], name)
            other.requires_grad_(True)
            self.optimizer_step(name)
            losses.append(outputs["loss"].detach())
        return {"loss": sum(losses), "first_loss": losses[0]}


class TwoBackwards(TrainStep):
    """The loss, and a penalty with a backward of its own."""

    def train_batch(self, batch):
        outputs = self.forward(batch)
        self.backward(outputs["loss"])
        penalty = sum((parameter**2).sum() for parameter in self.model.head.parameters())
        self.backward(0.01 * penalty)
        return outputs


class Thaw(Callback):
    """Freezes the head at the start, and trains it from one step on."""

    def __init__(self, step):
        self.step = step

    def on_fit_start(self, trainer, train, val, loop):
        if trainer.progress.step == 0:
            trainer.model.head.requires_grad_(False)

    def on_train_batch_start(self, trainer, model, batch, batch_index):
        if trainer.progress.step == self.step:
            model.head.requires_grad_(True)


class Settle(Callback):
    """Puts the norms into evaluation mode from one step on."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, model, batch, batch_index):
        if trainer.progress.step >= self.step:
            model.body.eval()
'''


class RandomExperiment:
    """A config, as the file of an experiment, and how many steps it has at most."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.steps = self._random.randint(18, 36)
        self.config = self._config()

    def file(self) -> str:
        """The experiment as YAML."""
        defaults = [{f"override /{group}": None} for group in ("model", "data", "optimizer")]
        header = "# @package _global_\n# An experiment that was drawn\n"
        return header + yaml.safe_dump({"defaults": defaults, **self.config}, sort_keys=False)

    def _config(self) -> dict[str, Any]:
        chance = self._random
        step = chance.choice((None, None, None, None, "Alternating", "TwoBackwards"))
        data = self._data()
        accumulation = 1 if step == "Alternating" else chance.choice((1, 1, 2, 3))
        loop = self._loop(data["kind"], accumulation)
        lbfgs = step is None and accumulation == 1 and chance.random() < 0.1
        dtype = "fp32" if lbfgs or step == "Alternating" else chance.choice(("fp32", "fp32", "fp32", "bf16", "fp16"))
        config: dict[str, Any] = {
            "seed": chance.randrange(100),
            "model": self._model(step),
            "data": {"_target_": "mine.random_parts.Data", **data},
            "optimizer": self._optimizer(step, lbfgs=lbfgs),
            "precision": {"dtype": dtype, **self._clipping(lbfgs=lbfgs)},
            "loop": loop,
            "checkpoint": self._checkpoint(),
            "callbacks": self._callbacks(lbfgs=lbfgs, may_freeze=step is None and not lbfgs),
        }
        if step is not None:
            config["step"] = {"_target_": f"mine.random_parts.{step}"}
        if not lbfgs and (schedule := self._schedule()) is not None:
            config["scheduler"] = schedule
        adapts = config["model"]["_target_"] == "trainer_cli.lora"
        is_sparse = step is None and not adapts and not lbfgs and dtype == "fp32" and chance.random() < 0.2
        if is_sparse and HAS_SPARSITY:
            config["sparsity"] = self._sparsity()
        return config

    def _model(self, step: str | None) -> dict[str, Any]:
        chance = self._random
        net = {
            "_target_": "mine.random_parts.Net",
            "norm": chance.choice(("none", "batch", "layer", "group")),
            "dropout": chance.choice((0.0, 0.2)),
            "tied": chance.random() < 0.3,
            "parametrized": chance.choice((None, None, None, "spectral_norm", "weight_norm")),
        }
        if step is None and net["parametrized"] is None and not net["tied"] and chance.random() < 0.15 and HAS_LORA:
            return {"_target_": "trainer_cli.lora", "model": net, "r": 2, "targets": ["body.[36]"]}
        return net

    def _data(self) -> dict[str, Any]:
        chance = self._random
        kind = chance.choice(("points", "points", "points", "loader", "stream", "stateful"))
        data: dict[str, Any] = {"kind": kind, "size": chance.choice((60, 90, 100))}
        if kind in ("points", "loader"):
            data["shuffle"] = chance.random() < 0.7
        if kind != "loader":
            data |= {"batch_size": chance.choice((6, 8)), "num_workers": chance.choice((0, 0, 0, 1, 2))}
        if kind == "points":
            data["drop_last"] = chance.random() < 0.3
        return data

    def _loop(self, kind: str, accumulation: int) -> dict[str, Any]:
        chance = self._random
        loop: dict[str, Any] = {
            "max_duration": self.steps,
            "grad_accum_steps": accumulation,
            "eval_interval": chance.choice((5, 7, "0.5ep", "1ep", "40sp", None)),
            "eval_steps": chance.choice((None, 2)),
            "eval_at_start": chance.random() < 0.3,
            "log_interval": chance.choice((1, 3, 5)),
        }
        if kind in ("stream", "stateful"):
            loop["steps_per_epoch"] = 4
            loop["eval_interval"] = chance.choice((5, 7, None))
        if chance.random() < 0.15:
            loop["limit_train_batches"] = 5
        return loop

    def _optimizer(self, step: str | None, *, lbfgs: bool) -> dict[str, Any]:
        chance = self._random
        if lbfgs:
            return {"_target_": "torch.optim.LBFGS", "lr": 0.1, "max_iter": 3}
        nodes = (
            {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": chance.choice((0.0, 0.9))},
            {"_target_": "torch.optim.Adam", "lr": 0.01},
            {"_target_": "torch.optim.AdamW", "lr": 0.01, "weight_decay": 0.1},
            {"_target_": "torch.optim.RMSprop", "lr": 0.01},
        )
        if step == "Alternating":
            return {"body": {**chance.choice(nodes), "params": "body.*"}, "head": dict(chance.choice(nodes))}
        return dict(chance.choice(nodes))

    def _clipping(self, *, lbfgs: bool) -> dict[str, Any]:
        return {} if lbfgs else self._random.choice(({}, {"clip_norm": 1.0}, {"clip_value": 0.5}))

    def _schedule(self) -> dict[str, Any] | None:
        chance = self._random
        torch = "torch.optim.lr_scheduler"
        return chance.choice(
            (
                None,
                {"_target_": "trainer_cli.WarmupCosine", "warmup": chance.choice((3, "0.2dur"))},
                {"_target_": "trainer_cli.WarmupStableDecay", "warmup": 2},
                {"_target_": f"{torch}.ExponentialLR", "gamma": 0.97, "interval": chance.choice(("step", "epoch"))},
                {"_target_": f"{torch}.ReduceLROnPlateau", "metric": "val/loss", "mode": "min", "patience": 0},
                {"_target_": f"{torch}.OneCycleLR", "max_lr": 0.02, "total_steps": "1dur", "cycle_momentum": False},
            )
        )

    def _checkpoint(self) -> dict[str, Any]:
        chance = self._random
        checkpoint: dict[str, Any] = {
            "save_interval": chance.choice((6, 9, "1ep")),
            "save_async": chance.random() < 0.5,
            "remove": chance.choice(("ephemeral_only", "all_without_rule", "never")),
            "pre_train_checkpoint": chance.choice((None, True, False)),
        }
        if checkpoint["save_interval"] != "1ep" and chance.random() < 0.6:
            checkpoint["ephemeral_save_interval"] = chance.choice((1, 2, 4))
        if checkpoint["remove"] != "never":
            checkpoint["max_checkpoints"] = chance.choice((None, 1, 2))
        if chance.random() < 0.3:
            checkpoint["fixed_steps"] = [chance.randint(1, self.steps)]
        if chance.random() < 0.3:
            checkpoint["keep_best"] = {"metric": "val/loss", "mode": "min", "count": chance.choice((1, 2))}
        return checkpoint

    def _callbacks(self, *, lbfgs: bool, may_freeze: bool) -> dict[str, Any]:
        chance = self._random
        choices: dict[str, dict[str, Any]] = {
            "norms": {"per_layer": True},
            "learning_rate_monitor": {},
            "check_finite": {"policy": "raise" if lbfgs else chance.choice(("raise", "skip"))},
            "early_stopping": {"metric": "val/loss", "mode": "min", "patience": "9st"},
        }
        targets = {"norms": "Norms", "learning_rate_monitor": "LearningRateMonitor", "check_finite": "CheckFinite"}
        targets |= {"early_stopping": "EarlyStopping", "ema": "EMA", "swa": "SWA"}
        average = chance.choice((None, None, "ema", "swa"))
        if average == "ema":
            choices["ema"] = {"decay": 0.9, "every": chance.choice((1, 2)), "start": chance.choice((0, 5, "0.3dur"))}
        if average == "swa":
            choices["swa"] = {"start": chance.choice((4, "0.5dur")), "every": chance.choice((1, 3))}
        kept = [name for name in choices if name == average or chance.random() < 0.25]
        callbacks = {name: {"_target_": f"trainer_cli.{targets[name]}", **choices[name]} for name in kept}
        if may_freeze and chance.random() < 0.2:
            callbacks["thaw"] = {"_target_": "mine.random_parts.Thaw", "step": chance.randint(2, 12)}
        if chance.random() < 0.2:
            callbacks["settle"] = {"_target_": "mine.random_parts.Settle", "step": chance.randint(2, 12)}
        return callbacks

    def _sparsity(self) -> dict[str, Any]:
        chance = self._random
        name = chance.choice(("Static", "GMP", "SET", "RigL"))
        more = {} if name == "Static" else {"every": 3, "stop": 15}
        return {"_target_": f"trainer_cli.{name}", "sparsity": 0.5, "parameters": ["body.3.*", "head.*"], **more}
