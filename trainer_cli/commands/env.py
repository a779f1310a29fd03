"""`train env`: versions, machine and paths for a bug report, without secrets.

Only listed environment variables are shown, the home directory is written `~`, and git remotes are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer_cli.commands.command_line import add_config_dir
from trainer_cli.config import PACKAGE, SearchPath, project_root, shipped_folder
from trainer_cli.environment import git_facts, versions
from trainer_cli.errors import ConfigError
from trainer_cli.parts import list_addons
from trainer_cli.terminal import clear_status

EXAMPLES = """examples:
  train env            for people
  train env --json     for programs
"""
SHOWN = (
    "TRAIN_FULL_ERROR", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ENABLE_MPS_FALLBACK",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "NCCL_DEBUG", "SLURM_JOB_ID",
    "PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "VIRTUAL_ENV", "CONDA_DEFAULT_ENV",
    "LANG", "LC_ALL", "TERM", "NO_COLOR", "FORCE_COLOR",
)  # fmt: skip
"""The variables whose values are printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Print the facts. An error is printed in the place of its fact, so that a broken setup can be reported."""
    facts = gather(args.config_dir)
    clear_status()
    print(json.dumps(facts, indent=2) if args.json else "\n".join(_lines(facts)))
    return 0


def gather(config_dir: Path | None = None) -> dict[str, dict[str, Any]]:
    """All facts, in sections."""
    cwd = Path.cwd()
    root = project_root(config_dir, cwd)
    try:
        configs: Any = [_shorten_home(folder) for folder in SearchPath.without_own(config_dir, cwd).named_dirs]
    except ConfigError as error:
        configs = str(error)
    facts: dict[str, dict[str, Any]] = {
        "versions": {"python": platform.python_version(), **versions()},
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            # A container or Slurm may allow fewer cores than the machine has.
            "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": _to_gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        },
        "torch": _torch_facts(),
        "paths": {
            "python": _shorten_home(sys.executable),
            "package": _shorten_home(PACKAGE),
            "configs": configs,
            "current": _shorten_home(cwd),
            "project_root": _shorten_home(root),
        },
        "addons": list_addons(),
        "git": {"project": git_facts(root), **_package_git()},
        "variables": dict(_list_variables(os.environ)),
    }
    return facts


def _torch_facts() -> dict[str, Any]:
    """Facts about torch and the devices; or why torch cannot be imported."""
    try:
        import torch
    except Exception as error:
        # A broken build may raise anything, and belongs in the bug report.
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".strip()}
    facts: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "devices": ["cpu"],
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            facts["devices"].append(f"cuda:{index} {device.name}, {_to_gib(device.total_memory)} GiB")
    if torch.backends.mps.is_available():
        facts["devices"].append("mps")
    return facts


def _package_git() -> dict[str, Any]:
    """The commit of this package if it is used from a checkout; else empty."""
    shipped = shipped_folder("configs")
    is_checkout = shipped is not None and shipped.parent == PACKAGE.parent
    return {"package": git_facts(PACKAGE.parent)} if is_checkout else {}


def _list_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The listed variables that are set, and the names of other TRAIN_ variables, without their values."""
    for name in SHOWN:
        if name in environment:
            yield name, os.pathsep.join(map(_shorten_home, environment[name].split(os.pathsep)))
    for name in sorted(environment):
        if name.startswith("TRAIN_") and name not in SHOWN:
            # Its value may be a token: the name says enough for a bug report.
            yield name, "(set)"


def _shorten_home(path: Path | str) -> str:
    """A path with the home directory written as `~`."""
    # Not Path.home(), which raises for a user without one: here `home` is then `~`, and no path begins with it.
    text, home = str(path), os.path.expanduser("~")
    # With a separator: /home/me2 is not inside of /home/me.
    is_inside = text == home or text.startswith(home + os.sep)
    return "~" + text[len(home) :] if is_inside and home != os.sep else text


def _to_gib(size_bytes: int) -> float:
    """Bytes in GiB, to one decimal."""
    return round(size_bytes / 2**30, 1)


def _lines(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The facts for people: each section with its names and values in two columns."""
    width = max(len(name) for section in facts.values() for name in section)
    for number, (section, values) in enumerate(facts.items()):
        yield f"{'' if number == 0 else chr(10)}{section}"
        for name, value in values.items():
            for line, text in enumerate(_format_value(value)):
                yield f"  {'' if line else name:{width}}  {text}".rstrip()
        if not values:
            yield "  none"


def _format_value(value: Any) -> list[str]:
    """The lines of a value: one for each item of a list."""
    if isinstance(value, list):
        return [str(item) for item in value]
    if isinstance(value, dict):
        return [", ".join(f"{key} {item}" for key, item in value.items())]
    return ["-" if value is None else str(value)]
