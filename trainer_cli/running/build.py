"""Build the objects that a config describes: the only file that instantiates a `_target_`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Subset

from trainer_cli.auto_values import AUTO
from trainer_cli.callbacks import CheckpointerCallback, RunIdentity
from trainer_cli.components import (
    SAVER,
    SECTIONS,
    SPECIAL,
    Trust,
    as_node,
    check_keys,
    fill_from_data,
    import_target,
    is_node,
    list_optimizers,
)
from trainer_cli.config import batches_of_step, check_strategy
from trainer_cli.data import as_loader
from trainer_cli.errors import ConfigError, TrainError, raise_all
from trainer_cli.files import as_path
from trainer_cli.keys import DATA_KEYS
from trainer_cli.layout import CONFIG_FILE
from trainer_cli.leaves import walk
from trainer_cli.messages import Logging
from trainer_cli.optim import make_optimizer, parameters_of, schedule_from
from trainer_cli.parallel import ALONE, ProcessGroup
from trainer_cli.running.reach import check_folder, check_partial, check_reach
from trainer_cli.schema import CheckpointConfig, Dtype, ParallelConfig, ParallelStrategy, TrainConfig
from trainer_cli.signatures import find_misfits, read_parameters
from trainer_cli.steps import GLOBAL_BATCH_SIZE
from trainer_cli.strategies import DDP, Single, Strategy, find_blocks, recompute
from trainer_cli.torch_compat import leave_compiler_out_of_shapes
from trainer_cli.trainer import Precision, Trainer, TrainingLoop, pick_device, seed_everything

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from trainer_cli.origin import DataAndSource


def strategy_of(config: ParallelConfig, dtype: Dtype, group: ProcessGroup) -> Strategy:
    """The strategy by which the processes train one model.

    Raises:
        ConfigError: the strategy does not fit the number of processes, or its options conflict.
    """
    check_strategy(config, dtype, group.world_size)
    if config.strategy is ParallelStrategy.fsdp:
        from trainer_cli.strategies import FSDP

        return FSDP(
            group,
            shard_size=config.shard_size,
            wrap=config.wrap,
            wrap_min_parameters=config.wrap_min_parameters,
            dtype=torch.bfloat16 if config.mixed_precision and dtype is Dtype.bf16 else None,
            cpu_offload=config.cpu_offload,
        )
    if config.strategy is ParallelStrategy.ddp and group.world_size > 1:
        return DDP(group, find_unused_parameters=config.find_unused_parameters)
    return Single()


_NO_DISPLAY = {"console": None}
"""Loggers of a trainer that shows metrics only if the config has a logger for it."""


@dataclass(frozen=True, slots=True)
class Data:
    """The object that `data` describes, and its loaders."""

    source: Any
    train: Any
    val: dict[str, Any]

    @property
    def loaders(self) -> dict[str, Any]:
        """All loaders, by name."""
        return {**self.val, "train": self.train}


class Builder:
    """Builds every part of one config. Errors name the key path of the part."""

    def __init__(self, config: TrainConfig, trust: Trust, group: ProcessGroup = ALONE) -> None:
        self.config = config
        self.trust = trust
        self.group = group
        self._run_dir: Path | None = None

    def data(self, *, predicts: bool = False) -> Data:
        """Build the data object, and loaders for its `train` and `val`.

        Args:
            predicts: add a loader for the part `predict` of the data object, if it has one, to those of `val`.

        Raises:
            ConfigError: the node is wrong, or its object has no `train`.
        """
        # A random split in the constructor must be the same on a resume.
        seed_everything(self.config.seed)
        node = as_node(self.config.data, "data")
        settings = {key: node[key] for key in DATA_KEYS if key in node and key != GLOBAL_BATCH_SIZE}
        if isinstance(settings.get("collate_fn"), str):
            settings["collate_fn"] = import_target(settings["collate_fn"], "data.collate_fn", self.trust)
        elif settings.get("collate_fn") is not None:
            settings["collate_fn"] = self.make(settings["collate_fn"], "data.collate_fn")
        settings["batch_size"], _ = batches_of_step(self.config, self.group.data_size)
        # The rank in the data group: the ranks of a tensor group must read the same samples.
        settings |= {"rank": self.group.data_rank, "world_size": self.group.data_size}
        # Pinned memory makes the copies to the device asynchronous.
        settings["pin_memory"] = pick_device(self.config.device).type == "cuda"
        if settings.get("num_workers") == AUTO:
            # Samples do not depend on it: only a fit finds a number.
            settings["num_workers"] = 0
        val_batch_size, overfit = settings.pop("val_batch_size", None), settings.pop("overfit_batches", None)
        drop_last = bool(settings.pop("drop_last", False))
        source = self.make({key: value for key, value in node.items() if key not in DATA_KEYS}, "data")
        if getattr(source, "train", None) is None:
            raise ConfigError(
                f"the object that data makes ({type(source).__name__}) has no 'train'",
                location="data",
                hint="Give it a Dataset or DataLoader named train, and one or a mapping of them named val; "
                "_target_: trainer_cli.Datasets does so with `train` and `val` of the config.",
            )
        seed = self.config.seed
        val = getattr(source, "val", None)
        if not isinstance(val, Mapping):
            val = {} if val is None else {"val": val}
        val_sets = val
        if predicts and getattr(source, "predict", None) is not None:
            val_sets = {**val_sets, "predict": source.predict}
        train_set = source.train
        if overfit is not None:
            train_set = _take_subset(source.train, overfit * int(settings.get("batch_size") or 32), seed)
            val_sets, val_batch_size = dict.fromkeys(val_sets or {"val": None}, train_set), None
        train = as_loader(train_set, shuffle=overfit is None, seed=seed, drop_last=drop_last, name="train", **settings)
        # After the training loader, which has its own batch size.
        if val_batch_size is not None:
            settings["batch_size"] = val_batch_size
        loaders = {
            str(name): as_loader(val_set, shuffle=False, seed=seed, name=str(name), **settings)
            for name, val_set in val_sets.items()
        }
        return Data(source, train, loaders)

    def model(self, source: Any) -> nn.Module:
        """Build the model. A key with the value `from_data`, at any depth, takes the data's attribute of that name."""
        node = fill_from_data(as_node(self.config.model, "model"), source, "model")
        model: nn.Module = self.make(node, "model")
        return model

    def _trained_model(self, source: Any) -> nn.Module:
        """Build the model, with activation checkpointing if the config asks for it."""
        model, parallel = self.model(source), self.config.parallel
        if parallel.activation_checkpointing:
            recompute(find_blocks(model, parallel.wrap, parallel.wrap_min_parameters))
        return model

    def optimizer(self, model: nn.Module) -> Optimizer | dict[str, Optimizer]:
        """Build the optimizer with its parameter groups, or a dict of named optimizers."""
        nodes = list_optimizers(self.config.optimizer)
        if list(nodes) == ["optimizer"]:
            return self._optimizer(model, "optimizer", nodes["optimizer"])
        parameters = parameters_of(
            model, {where.partition(".")[2]: node.get("params") for where, node in nodes.items()}
        )
        optimizers = {}
        for (where, node), (name, parameter_names) in zip(nodes.items(), parameters.items(), strict=True):
            arguments = {key: value for key, value in node.items() if key != "params"}
            optimizers[name] = self._optimizer(model, where, arguments, parameter_names)
        return optimizers

    def _optimizer(self, model: nn.Module, where: str, node: Any, names: list[str] | None = None) -> Optimizer:
        """Build the optimizer of a node for the parameters with these names; None: for all."""
        node = as_node(node, where)
        target = import_target(str(node.get("_target_")), f"{where}._target_", self.trust)

        def call(groups: Sequence[Any], settings: Mapping[str, Any], pattern: str | None) -> Any:
            return self.make(settings, where if pattern is None else f"param_groups.{pattern}", first=(groups,))

        optimizer: Optimizer = make_optimizer(
            model, target, node, param_groups=self.config.param_groups, names=names, call=call
        )
        return optimizer

    def loop(self) -> TrainingLoop:
        """Build the training loop. `data.global_batch_size`, if set, decides the number of batches per step.

        Raises:
            ConfigError: the number of ranks does not divide the global batch size.
        """
        _, grad_accum_steps = batches_of_step(self.config, self.group.data_size)
        return TrainingLoop(config=replace(self.config.loop, grad_accum_steps=grad_accum_steps))

    def schedulers(self, loop: TrainingLoop) -> Any:
        """Factories of the schedulers, in the nesting that the trainer expects."""
        return self._schedulers(self.config.scheduler, "scheduler", loop)

    def _schedulers(self, node: Any, where: str, loop: TrainingLoop) -> Any:
        """`schedulers` for the value of the key `where`: null, a node, or a mapping of names to such values."""
        if node is None:
            return None
        is_mapping = isinstance(node, Mapping) and not is_node(node)
        if is_mapping and (where == "scheduler" or any(map(is_node, node.values()))):
            return {
                str(name): self._schedulers(child, f"{where}.{name}", loop)
                for name, child in node.items()
                if child is not None
            }
        node = as_node(node, where)
        target = import_target(node["_target_"], f"{where}._target_", self.trust)
        settings = {str(key): value for key, value in node.items() if key not in SPECIAL}
        special = {key: value for key, value in node.items() if key in SPECIAL}

        def call(*first: Any, **arguments: Any) -> Any:
            return self.make({**special, **arguments}, where, first=first)

        schedule = schedule_from(target, settings, loop, where=where, call=call, adds_mode="_args_" not in node)
        return schedule.resolve(target, where)

    def step(self) -> Any:
        """Build the training step; None for the default one."""
        return None if self.config.step is None else self.make(as_node(self.config.step, "step"), "step")

    def _sparsity(self) -> Any:
        """Build the object that holds weights at zero; None if the config has none."""
        node = self.config.sparsity
        return None if node is None else self.make(as_node(node, "sparsity"), "sparsity")

    def _compile(self) -> dict[str, Any] | None:
        """The arguments of torch.compile; None if the model is not compiled."""
        settings = asdict(self.config.compile)
        return settings if settings.pop("enabled") else None

    def trainer(
        self,
        data: Data,
        *,
        identity: RunIdentity,
        run_dir: Path,
        hparams: Mapping[str, bool | int | float | str] | None = None,
        saver: Any = None,
        loggers: Mapping[str, Any] | None = None,
        observers: Mapping[str, Any] | None = None,
    ) -> Trainer:
        """Build the trainer of a fit, with all its parts except the data.

        Args:
            hparams: hyperparameters for loggers.
            saver: used in place of the callback that saves.
            loggers: used in place of those of the config.
            observers: further callbacks, called after those of the config.
        """
        config = self.config
        self._run_dir = run_dir
        if saver is None:
            folder = config.checkpoint.folder
            copies = config.checkpoint.copy_to.folder
            for key, configured in (("checkpoint.folder", folder), ("checkpoint.copy_to.folder", copies)):
                check_folder(key, configured, self.trust, run_dir, identity.run_id)
            saver = self._checkpointer(run_dir / "checkpoints" if folder is None else as_path(folder), identity)
        if loggers is None:
            # Only rank 0 logs.
            loggers = self._make_components("loggers", config.loggers if self.group.is_main else {})
        loop = self.loop()
        # With the loop of this trainer: a schedule reads its length when it is built, after the data is known.
        schedulers = self.schedulers(loop)
        return Trainer(
            # Called by the trainer, after it has seeded the random generators.
            model=lambda: self._trained_model(data.source),
            optimizer=self.optimizer if config.optimizer is not None else None,
            schedulers=schedulers,
            model_call=config.model_call,
            freeze=config.freeze,
            eval_modules=config.eval_modules,
            compile=self._compile(),
            step=self.step(),
            precision=Precision(config=config.precision),
            sparsity=self._sparsity(),
            loop=loop,
            checkpoint=saver,
            callbacks={**self._callbacks(), **(observers or {})},
            loggers={**_NO_DISPLAY, **loggers},
            seed=config.seed,
            deterministic=config.deterministic,
            device=config.device,
            strategy=strategy_of(config.parallel, config.precision.dtype, self.group),
            run_dir=run_dir,
            name=config.name or "default",
            logging=Logging(console=config.logging.console),
            config=identity.extra_files.get(CONFIG_FILE, b"").decode(),
            hparams=hparams,
        )

    def trial(self) -> tuple[Trainer, Data]:
        """Build what trains, with its data, for measurements: without callbacks, loggers, schedules and checkpoints."""
        saves = CheckpointConfig(enabled=False, save_interval=None)
        config = replace(self.config, scheduler=None, callbacks={}, loggers={}, checkpoint=saves)
        builder = Builder(config, self.trust, self.group)
        data = builder.data()
        return builder.trainer(data, identity=RunIdentity(), run_dir=Path(config.run_dir), loggers={}), data

    def evaluator(self, data: Data) -> Trainer:
        """Build a trainer that only evaluates: with a new model, without optimizer and loggers."""
        config = self.config
        return Trainer(
            model=lambda: self.model(data.source),
            model_call=config.model_call,
            freeze=config.freeze,
            compile=self._compile(),
            step=self.step(),
            precision=Precision(config=config.precision),
            loop=TrainingLoop(config=config.loop),
            callbacks=self._callbacks(),
            loggers=_NO_DISPLAY,
            seed=config.seed,
            device=config.device,
        )

    def shapes(self, data: Data, *, values: bool = False) -> Trainer:
        """Build a trainer on the meta device: its state has the shapes of the real one, but no values.

        It has no loggers, and of the callbacks only those of this package.

        Args:
            values: build on the CPU, with values. So is a model that cannot be built on the meta device.
        """
        config = self.config
        callbacks = {name: node for name, node in config.callbacks.items() if name != SAVER and _is_shipped(node)}

        def build_on(device: str) -> Trainer:
            # The meta device allocates nothing, so a model larger than the memory has a size too.
            with torch.device(device):
                model = self.model(data.source)
            loop = TrainingLoop(config=config.loop)
            return Trainer(
                model=model,
                optimizer=self.optimizer if config.optimizer is not None else None,
                schedulers=self.schedulers(loop),
                freeze=config.freeze,
                eval_modules=config.eval_modules,
                step=self.step(),
                sparsity=self._sparsity(),
                loop=loop,
                callbacks=self._make_components("callbacks", callbacks),
                loggers=_NO_DISPLAY,
                seed=config.seed,
                device=device,
            )

        if not values:
            leave_compiler_out_of_shapes()
            # An error of the meta device alone does not matter; any other occurs on the CPU again.
            with suppress(Exception):
                return build_on("meta")
        return build_on("cpu")

    def make(self, node: Any, where: str, first: tuple[Any, ...] = ()) -> Any:
        """Build the object that a node with `_target_` describes, after the objects of nested nodes.

        In a list or mapping that is not a node, each node is replaced by its object; other values stay.

        Args:
            where: the key of the node.
            first: positional arguments before those of the node.

        Raises:
            ConfigError: the target cannot be imported or is not trusted, or its constructor refuses the arguments.
        """
        if isinstance(node, list):
            return [self.make(item, f"{where}.{index}") for index, item in enumerate(node)]
        if not isinstance(node, Mapping):
            return node
        if "_target_" not in node:
            return {key: self.make(value, f"{where}.{key}") for key, value in node.items()}
        target: Any = import_target(node["_target_"], f"{where}._target_", self.trust)
        raise_all(list(check_keys(node, where)))
        positional = [*first, *self.make(list(node.get("_args_", [])), f"{where}._args_")]
        named = {str(key): self.make(value, f"{where}.{key}") for key, value in node.items() if key not in SPECIAL}
        is_partial = bool(node.get("_partial_"))
        parameters = read_parameters(target)
        if parameters is not None:
            name = getattr(target, "__name__", str(node["_target_"]))
            misfits = find_misfits(where, name, parameters, positional, named, first=len(first), partial=is_partial)
            raise_all(list(misfits))
        # This comes after the check of its arguments: a mistake is reported now, not at the call in the training.
        if is_partial:
            check_partial(target, where, self.trust)
            return partial(target, *positional, **named)
        try:
            instance = target(*positional, **named)
            check_reach(instance, where, self.trust, self._run_dir)
            return instance
        except TrainError as error:
            # An error of a constructor names its argument, if at all: the key of that is below the node.
            if error.where is None or error.where in named:
                error.where = where if error.where is None else f"{where}.{error.where}"
            raise
        # Other errors keep their traceback: they are faults of the component, not of its arguments.
        except (ValueError, TypeError, FileNotFoundError) as error:
            raise ConfigError(f"{node['_target_']} refused its arguments: {error}", location=where) from error

    def _callbacks(self) -> dict[str, Any]:
        """Build all callbacks except the one that saves."""
        nodes = {name: node for name, node in self.config.callbacks.items() if name != SAVER}
        return self._make_components("callbacks", nodes)

    def _checkpointer(self, folder: Path, identity: RunIdentity) -> Any:
        """Build the CheckpointerCallback, or the subclass that `callbacks.checkpoint` names with its arguments."""
        settings, node = self.config.checkpoint, self.config.callbacks.get(SAVER)
        if node is None:
            return CheckpointerCallback(folder, config=settings, identity=identity)
        where = f"callbacks.{SAVER}"
        # Field by field: the node may set fields, and the subclass may have parameters with the names of fields.
        fields = {**asdict(settings), "folder": folder, "identity": identity}
        check_folder(f"{where}.folder", as_node(node, where).get("folder"), self.trust, folder.parent, identity.run_id)
        callback = self.make({**fields, **as_node(node, where)}, where)
        if not isinstance(callback, CheckpointerCallback):
            raise ConfigError(
                f"{where} is a {type(callback).__name__}, but under this name belongs a subclass of "
                "CheckpointerCallback",
                location=where,
                hint="Give your callback another name.",
            )
        return callback

    def _make_components(self, section: str, nodes: Mapping[str, Any]) -> dict[str, Any]:
        """Build the components of a section, by name, without those that are null."""
        return {
            name: self.make(as_node(node, f"{section}.{name}"), f"{section}.{name}")
            for name, node in nodes.items()
            if node is not None
        }


def _take_subset(dataset: Any, count: int, seed: int) -> Any:
    """A fixed subset of `count` samples of a dataset, chosen by the seed.

    Raises:
        ConfigError: the dataset makes its own batches, or has no length.
    """
    is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, DataLoader) or not is_map_style:
        raise ConfigError(
            f"data.overfit_batches needs a dataset with __len__ and __getitem__, and train is a "
            f"{type(dataset).__name__}",
            location="data.overfit_batches",
        )
    # A generator of its own: the draws of the global one must not depend on this option.
    indices = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:count]
    return Subset(dataset, indices.tolist())


def make_identity(
    config: TrainConfig, text: bytes, origin: DataAndSource, *, run_id: str, attempt: int, **places: Path
) -> RunIdentity:
    """The facts about an attempt that its checkpoints contain.

    Args:
        text: the config as it is stored.
        places: `local_folder` and `history_file` of `RunIdentity`.
    """
    return RunIdentity(
        run_id=run_id,
        attempt=attempt,
        config_digest="sha256:" + hashlib.sha256(text).hexdigest(),
        target_packages=target_packages(config),
        extra_files={CONFIG_FILE: text},
        samples=origin.samples,
        source=origin.source,
        **places,
    )


def target_packages(config: TrainConfig) -> tuple[str, ...]:
    """The top-level packages of all `_target_`s of a config, sorted."""
    leaves = chain.from_iterable(walk(getattr(config, section)) for section in SECTIONS)
    targets = (leaf for key, leaf in leaves if isinstance(leaf, str) and key.rpartition(".")[2] == "_target_")
    return tuple(sorted({target.partition(".")[0] for target in targets}))


def _is_shipped(node: Any) -> bool:
    """Whether a node names a class of this package."""
    return isinstance(node, Mapping) and str(node.get("_target_")).startswith("trainer_cli.")
