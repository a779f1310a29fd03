"""`train ckpt export`, `average` and `strip`: their flags, and what they print."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.catalog import rank_variables_in
from trainer_cli.commands import Action
from trainer_cli.errors import CheckpointError, ExitCode, UserError
from trainer_cli.files import as_path
from trainer_cli.ranks import read_rank_and_size
from trainer_cli.running import showing_import
from trainer_cli.terminal import format_bytes, format_count, print_json

if TYPE_CHECKING:
    from trainer_cli.addons.formats.export_run import Written

FORMATS = ("huggingface", "safetensors", "torch", "archive")
DTYPES = ("float32", "bfloat16", "float16", "float64")
_UNITS = {"": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def _bytes(text: str) -> int:
    """Parse a size of the command line, such as `5GB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return int(float(match[1]) * _UNITS[match[2]])


def _pair(text: str) -> tuple[str, str]:
    """Parse OLD=NEW of the command line."""
    old, equals, new = text.partition("=")
    if not equals or not old:
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW, such as 'model.*=*'")
    return old, new


def _numbers(text: str) -> list[float]:
    """Parse numbers of the command line, separated by commas."""
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,1,2") from None


def _output(text: str) -> Path:
    return as_path(text, "--output", local=True)


_FLAGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "--format": (("--format",), {"choices": FORMATS, "required": True, "help": "what to write"}),
    "--output": (("-o", "--output"), {"type": _output, "metavar": "PATH", "help": "where (RUN/export/NAME)"}),
    "--to": (("-o", "--output"), {"type": _output, "metavar": "PATH", "required": True, "help": "the new checkpoint"}),
    "--dtype": (("--dtype",), {"choices": DTYPES, "help": "type of all floating-point tensors"}),
    "--shard-size": (
        ("--shard-size",),
        {"type": _bytes, "metavar": "SIZE", "help": "largest file of huggingface (5GB)"},
    ),
    "--ema": (
        ("--ema",),
        {
            "nargs": "?",
            "const": "ema",
            "metavar": "CALLBACK",
            "help": "the average of a callback (ema), or none: the trained weights; by default what was evaluated",
        },
    ),
    "--merge-lora": (
        ("--merge-lora",), {"action": "store_true", "help": "add LoRA adapters to the weights that they adapt"}
    ),
    "--key-mapping": (
        ("--key-mapping",),
        {
            "type": _pair,
            "action": "append",
            "default": [],
            "metavar": "OLD=NEW",
            "help": "glob of names=new name, such as 'model.*=*'; 'head.*=' leaves these out",
        },
    ),
    "--hf-config": (
        ("--hf-config",), {"type": Path, "metavar": "FILE", "help": "config.json, for a model that has none"}
    ),
    "--overwrite": (("--overwrite",), {"action": "store_true", "help": "replace what is at the output"}),
    "--weights": (("--weights",), {"type": _numbers, "metavar": "A,B", "help": "weight of each in the mean"}),
}  # fmt: skip


def _filled(output: Path, path: Path) -> Path:
    """The output, with the ranks of this process and the counts of the checkpoint filled in."""
    from trainer_cli.catalog import filled
    from trainer_cli.selection import StoredCheckpoint

    manifest = StoredCheckpoint(path).manifest
    counts = {} if manifest is None else {**manifest.progress, "step": manifest.step, "epoch": manifest.epoch}
    return Path(filled(str(output), counts))


def export_weights(args: argparse.Namespace) -> int:
    """Write the weights of a checkpoint in another format."""
    path = _select_one(args.names[0])
    # After the mistakes that need no torch.
    with showing_import():
        from trainer_cli.addons.formats.export import ExportFormat
        from trainer_cli.addons.formats.export_run import archive_one, export_one
    if args.overwrite and read_rank_and_size(os.environ)[1] > 1 and not rank_variables_in(str(args.output)):
        raise UserError(
            "each rank of this launch would replace the same output",
            where="--overwrite",
            cure="Run it in one process, or write {rank} into --output.",
        )
    output = None if args.output is None else _filled(args.output, path)

    if args.format == "archive":
        if args.dtype or args.ema or args.merge_lora or args.key_mapping or args.hf_config or args.shard_size:
            raise UserError(
                "an archive is a copy of the whole checkpoint: only --output and --overwrite apply to it",
                where="--format archive",
                cure="Leave the other options out, or choose another format.",
            )
        return _report(args, "exported", archive_one(path, output, overwrite=args.overwrite))

    if len({old for old, _ in args.key_mapping}) < len(args.key_mapping):
        raise UserError("--key-mapping names a glob twice")
    written = export_one(
        path,
        ExportFormat(args.format),
        output,
        dtype=args.dtype,
        shard_bytes=args.shard_size,
        ema=args.ema,
        merge_lora=args.merge_lora,
        key_mapping=dict(args.key_mapping),
        hf_config=args.hf_config,
        overwrite=args.overwrite,
    )
    return _report(args, "exported", written)


def average_weights(args: argparse.Namespace) -> int:
    """Save the mean of the weights of checkpoints."""
    from trainer_cli.selection import select

    selection = select(args.names)
    for path, problem in {**selection.skipped, **selection.damaged}.items():
        # Without it the mean would be mistaken for that of all.
        raise CheckpointError(f"it is not valid: {problem}", where=str(path), cure="Name those to average without it.")
    with showing_import():
        from trainer_cli.addons.formats.export_run import average as average_of

    shares = args.weights
    if shares is not None:
        # In the order of the command, in which the weights are given; the selection is sorted.
        in_order = dict.fromkeys(path for name in args.names for path in select([name]).paths)
        if len(shares) != len(in_order):
            raise UserError(
                f"--weights has {format_count(len(shares), 'number')} for {format_count(len(in_order), 'checkpoint')}"
            )
        by_path = dict(zip(in_order, shares, strict=True))
        shares = [by_path[path] for path in selection.paths]
    return _report(
        args, "averaged", average_of(selection.paths, _filled(args.output, selection.paths[-1]), shares, ema=args.ema)
    )


def strip_weights(args: argparse.Namespace) -> int:
    """Save a checkpoint of the weights only."""
    path = _select_one(args.names[0])
    with showing_import():
        from trainer_cli.addons.formats.export_run import strip as strip_one

    return _report(args, "stripped", strip_one(path, _filled(args.output, path), ema=args.ema))


def _select_one(name: str) -> Path:
    """The path of a checkpoint of this program or another; a run directory means its newest."""
    from trainer_cli.selection import select

    paths = select([name]).paths
    if len(paths) > 1:
        raise UserError(f"{name} names {len(paths)} checkpoints, but one is expected", cure=f"Name one: {paths[-1]}.")
    return paths[0]


def _report(args: argparse.Namespace, outcome: str, written: Written) -> int:
    """Print what was written, and which weights, as text or as JSON."""
    if args.json:
        facts = {"tensors": written.tensors, "size_bytes": written.size_bytes, "average": written.average}
        print_json({outcome: str(written.path), **facts})
    else:
        print(
            f"{outcome}: {written.path} ({format_count(written.tensors, 'tensor')}, {format_bytes(written.size_bytes)})"
        )
        if written.average is not None and args.ema is None:
            print(
                f"weights: the average of callback '{written.average}', which evaluations saw; "
                "--ema none takes the trained weights"
            )
    return ExitCode.DONE


ACTIONS: Mapping[str, Action] = {
    "export": Action(
        export_weights,
        1,
        "CKPT",
        (
            "--format", "--output", "--dtype", "--shard-size", "--ema", "--merge-lora", "--key-mapping", "--hf-config",
            "--overwrite", "--no-replay",
        ),
        "write the weights of a checkpoint for other programs",
        _FLAGS,
        "rm",
        "train ckpt export runs/digits@best --format safetensors --dtype bfloat16",
    ),
    "average": Action(
        average_weights,
        "+",
        "WHAT",
        ("--to", "--ema", "--weights"),
        "save the mean of the weights of several checkpoints",
        _FLAGS,
        "export",
        "train ckpt average 'runs/digits/checkpoints/step*' --output runs/mean",
    ),
    "strip": Action(
        strip_weights, 1, "CKPT", ("--to", "--ema"), "save the weights of a checkpoint alone", _FLAGS, "average"
    ),
}  # fmt: skip
"""The actions of `train ckpt` that this add-on brings."""
