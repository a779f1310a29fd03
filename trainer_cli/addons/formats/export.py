"""The weights of checkpoints in files of other programs, and their average."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import safetensors.torch
import torch

from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.loads import LORA_SCALING, LoadOptions, list_by_owner
from trainer_cli.state import make_state_dict
from trainer_cli.storage import replacing

Weights = Mapping[str, torch.Tensor]


_BY_PEFT = (
    "In Python: trainer_cli.load_model(CHECKPOINT).save_pretrained(FOLDER) writes the adapters, and "
    ".merge_and_unload().save_pretrained(FOLDER) the merged model."
)


def is_adapted(weights: Weights) -> bool:
    """Whether layers have the names that peft gives to adapted ones, which no `from_pretrained` finds."""
    return any(".base_layer." in name or ".original_module." in name or ".lora_A." in name for name in weights)


def check_loadable(weights: Weights, where: str) -> None:
    """Refuse weights that `from_pretrained` of transformers would leave out.

    Raises:
        CheckpointError: there are adapters in them.
    """
    if is_adapted(weights):
        merges = any(name.endswith(f".{LORA_SCALING}") for name in weights)
        raise CheckpointError(
            "the checkpoint has adapters, and from_pretrained would draw the adapted layers anew",
            where=where,
            cure="Add --merge-lora." if merges else _BY_PEFT,
        )


def merged_lora(weights: Weights, where: str) -> dict[str, torch.Tensor]:
    """The weights of the model without the adapters of `trainer_cli.lora`: each layer's weight plus the product of its
    matrices, computed in 32 bits. Names are those of the model without adapters.

    Raises:
        CheckpointError: there are no adapters.
    """
    layers = [name.removesuffix(f".{LORA_SCALING}") for name in weights if name.endswith(f".{LORA_SCALING}")]
    if not layers:
        if is_adapted(weights):
            raise CheckpointError(
                "the checkpoint has adapters of peft without their scaling, so they cannot be merged here",
                where=where,
                cure=_BY_PEFT,
            )
        raise CheckpointError("the checkpoint has no LoRA adapters", where=where)
    result = dict(weights)
    for layer in layers:
        tensors = {name.removeprefix(f"{layer}."): result.pop(name) for name in weights if name.startswith(f"{layer}.")}
        factor, transposed = tensors[LORA_SCALING].tolist()
        # In 32 bits, so that the sum is rounded once, at its end.
        product = tensors["lora_B.default.weight"].float() @ tensors["lora_A.default.weight"].float() * factor
        base = tensors["base_layer.weight"]
        tensors["base_layer.weight"] = (base.float() + (product.T if transposed else product)).to(base.dtype)
        result |= {f"{layer}.{name[11:]}": value for name, value in tensors.items() if name.startswith("base_layer.")}
    return result


class ExportFormat(StrEnum):
    """What an export is."""

    huggingface = "huggingface"
    """A folder with `model.safetensors`, or with shards and their index."""
    safetensors = "safetensors"
    """One file."""
    torch = "torch"
    """One file of torch.save: name -> tensor."""


def renamed(weights: Weights, mapping: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The weights under other names: glob -> new name, whose `*` are what the glob's matched; an empty one leaves out.

    Raises:
        UserError: a glob matches nothing, or two names become the same.
    """
    new_names = LoadOptions(key_mapping=mapping).renamed(weights)
    for glob in mapping:
        alone = LoadOptions(key_mapping={glob: "\0"}).renamed(weights)
        if "\0" not in alone.values():
            raise UserError(
                f"--key-mapping: {glob!r} matches nothing", cure=f"The names are like {next(iter(weights))}."
            )
    by_new_name: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if (new := new_names[name]) in by_new_name:
            raise UserError(f"--key-mapping: two tensors get the name {new!r}")
        if new:
            by_new_name[new] = value
    return by_new_name


def export(
    weights: Weights,
    output: Path,
    format: ExportFormat,
    *,
    metadata: Mapping[str, Mapping[str, int]] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
    extra: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> int:
    """Write weights, all or nothing; the bytes written.

    Tied weights are one tensor in a torch file. Formats of safetensors hold them under each name, so that every program
    finds all that it looks for.

    Args:
        metadata: paths of modules -> their version, for a torch file; see `make_metadata`.
        dtype: the type of all floating-point tensors; None: as they are.
        shard_bytes: the largest file of a `huggingface` export, by default 5 GB. A larger tensor has a file of its own.
        extra: further small files of a `huggingface` export, such as its config.json.

    Raises:
        UserError: `output` exists, and may not be replaced.
        OSError: the disk is full, or cannot be written; what was at `output` is as it was.
    """
    with replacing(output, overwrite=overwrite) as temporary:
        match format:
            case ExportFormat.torch:
                tensors = _cast(weights, dtype)
                torch.save(make_state_dict(tensors, metadata) if metadata else tensors, temporary)
            case ExportFormat.safetensors:
                _save_safetensors(_cast(weights, dtype), temporary)
            case ExportFormat.huggingface:
                temporary.mkdir()
                _save_shards(weights, dtype, temporary, shard_bytes or 5_000_000_000)
                for name, content in (extra or {}).items():
                    (temporary / name).write_bytes(content)
        files = [temporary] if temporary.is_file() else sorted(temporary.iterdir())
        return sum(file.stat().st_size for file in files)


class Average:
    """Running mean of the weights of the checkpoints that are added.

    Floating-point tensors are summed in 64 bits. Others are those of the last checkpoint that was added.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._last: dict[str, torch.Tensor] = {}
        self._total = 0.0
        self.differing: set[str] = set()
        """Names of tensors of whole numbers that are not the same in all."""

    def add(self, weights: Weights, where: str, weight: float = 1.0) -> None:
        """Add a checkpoint.

        Args:
            where: the checkpoint, for messages.

        Raises:
            CheckpointError: with a table of names, shapes and types that differ from those before.
        """
        if self._last and (rows := list(_differences(self._last, weights))):
            raise CheckpointError(f"{list_by_owner(f'{where} differs from those before', {'': rows})}\n")
        for name, value in weights.items():
            if value.is_floating_point() or value.is_complex():
                # A running sum in 16 or 32 bits would lose small differences between the checkpoints.
                wide = value.to(torch.complex128 if value.is_complex() else torch.float64)
                self._sums[name] = self._sums[name].add_(wide, alpha=weight) if self._last else wide * weight
            elif self._last and not torch.equal(self._last[name], value):
                self.differing.add(name)
        self._last = dict(weights)
        self._total += weight

    def result(self) -> dict[str, torch.Tensor]:
        """The mean, in the types of the weights."""
        return {
            name: (self._sums[name] / self._total).to(value.dtype) if name in self._sums else value
            for name, value in self._last.items()
        }


def _differences(before: Weights, weights: Weights) -> Iterator[str]:
    """A line for each tensor whose name, shape or type differs."""
    for name in sorted({*before, *weights}):
        if name not in weights or name not in before:
            yield f"{name}: {'missing' if name not in weights else 'only here'}"
        elif (before[name].shape, before[name].dtype) != (weights[name].shape, weights[name].dtype):
            old, new = before[name], weights[name]
            yield f"{name}: {tuple(new.shape)} of {new.dtype} instead of {tuple(old.shape)} of {old.dtype}"


def _cast(weights: Weights, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The weights in another type, each contiguous in memory of its own; those that are one tensor stay one."""
    # By identity, so that tied weights stay tied.
    distinct = {id(value): value for value in weights.values()}
    cast = {key: _with_own_storage(value.to(_type(value, dtype))) for key, value in distinct.items()}
    return {name: cast[id(value)] for name, value in weights.items()}


def _with_own_storage(value: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it is a part of a storage: torch.save would write the whole of it."""
    value = value.contiguous()
    return value if value.nbytes == value.untyped_storage().nbytes() else value.clone()


def _type(value: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type in which a tensor is written: `dtype` for a floating-point one, if that is not None."""
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def _save_safetensors(tensors: Weights, path: Path) -> None:
    """Write one file, with the permissions of a new file."""
    untied = dict(tensors)
    seen: set[int] = set()
    for name, value in tensors.items():
        if value.data_ptr() in seen and value.numel():
            untied[name] = value.clone()  # The format has no tied tensors.
        seen.add(value.data_ptr())
    # safetensors replaces the file by one that only its owner can read.
    path.touch()
    mode = path.stat().st_mode
    safetensors.torch.save_file(untied, path, metadata={"format": "pt"})
    path.chmod(stat.S_IMODE(mode))


def _save_shards(weights: Weights, dtype: torch.dtype | None, folder: Path, shard_bytes: int) -> None:
    """Write files of at most `shard_bytes` of tensors; one shard at a time is cast, not the whole model."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size_bytes = total = 0
    for name, value in weights.items():
        nbytes = value.numel() * _type(value, dtype).itemsize
        if shards[-1] and size_bytes + nbytes > shard_bytes:
            shards.append({})
            size_bytes = 0
        shards[-1][name] = value
        size_bytes += nbytes
        total += nbytes
    if len(shards) == 1:
        _save_safetensors(_cast(shards[0], dtype), folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _save_safetensors(_cast(shard, dtype), folder / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
