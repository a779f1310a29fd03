"""Log handlers for terminal and file, metrics of the run, and the closing summary."""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.core.naming import parse_step
from trainer_cli.core.schema import KeepBestConfig, Mode
from trainer_cli.runs.metrics import mode_of
from trainer_cli.runs.run_dir import Outcome, RunDir
from trainer_cli.runs.select import ckpt_argument
from trainer_cli.terminal import columns, is_terminal, wrapped

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)


def best_metrics(metrics_file: Path, keep_best: KeepBestConfig) -> dict[str, dict[str, Any]]:
    """The best finite value of each validation metric so far, its step, and whether best is `min` or `max`; of equal
    values the newest. A metric whose mode is unknown has none.
    """
    best: dict[str, dict[str, Any]] = {}
    for step, key, value in _validation_metrics(metrics_file):
        mode = mode_of(key, keep_best.metric, keep_best.mode)
        if mode is None or not math.isfinite(value):
            continue
        sign = -1 if mode is Mode.min else 1
        if key not in best or sign * value >= sign * best[key]["value"]:
            best[key] = {"value": value, "step": step, "mode": mode.value}
    return best


def last_metrics(metrics_file: Path) -> dict[str, float]:
    """The newest value of each validation metric; it may be NaN or infinite."""
    return {key: value for _, key, value in _validation_metrics(metrics_file)}


def _validation_metrics(metrics_file: Path) -> Iterator[tuple[int, str, float]]:
    """Step, name and value, in the order written; NaN and infinity are texts in metrics.jsonl."""
    if not metrics_file.exists():
        return
    for line in metrics_file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            for key, value in record.items():
                if "/" in key and not key.startswith("train/"):
                    yield int(record["step"]), key, float(value)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # Cut off by a power failure, or not written by this package.


def kept(trainer: Trainer) -> list[dict[str, str]]:
    """The checkpoints on the disk, and why each is kept."""
    try:
        reasons: Mapping[str, str] = getattr(trainer.checkpoint, "kept", dict)()
    except OSError as error:
        log.warning("cannot list the checkpoints: %s", error)
        return []
    return [{"name": name, "why": why} for name, why in reasons.items()]


def already_done(run: RunDir, step: int, reason: str) -> None:
    """Print that a finished run was started again."""
    print(f"{run.path} is finished at step {step} ({reason}); nothing to do.")
    kept = run.read_summary().get("checkpoints")
    more = f"; to evaluate:\n  {_validate_command(run, kept)}" if kept else "."
    print(f"To train further, give a larger loop.max_duration{more}")


def closing(run: RunDir, outcome: Outcome, metrics: Mapping[str, float]) -> None:
    """Print how the run ended, where its files are, and what to type next."""
    rate = outcome.throughput.get("samples_per_s", 0.0)
    took = f"{outcome.wall_time_s:.1f}s, {rate:,.0f} samples/s"
    _print(f"\n{outcome.status} at step {outcome.step}: {outcome.reason} ({took})")
    last = {key: value for key, value in metrics.items() if not key.startswith("train/")}
    for key, value in last.items():
        best = outcome.best_metrics.get(key)
        note = f"   (best {best['value']:.4g} at step {best['step']})" if best else ""
        _print(f"  {key:<16} {value:.4f}{note}")
    _print(f"  {'run directory':<16} {run.path}")
    if outcome.checkpoints:
        names = ", ".join(f"{one['name']} ({one['why']})" for one in _distinctive_first(outcome.checkpoints)[:4])
        more = len(outcome.checkpoints) - 4
        _print(f"  {'checkpoints':<16} {names}{f' and {more} more' if more > 0 else ''}")
    if outcome.status == "finished":
        commands = [_validate_command(run, outcome.checkpoints)] if outcome.checkpoints else []
        if (run.path / "tensorboard").is_dir():
            commands.append(f"tensorboard --logdir {shlex.quote(str(run.path.parent))}")
        if commands:
            # Not wrapped: a command is copied as a whole.
            print("\n  ".join(["next:", *commands]))
    else:
        _print("next: the same command again resumes from here.")
    sys.stdout.flush()


def _print(text: str) -> None:
    """Print to stdout; on a terminal wrapped between words."""
    print(wrapped(text, columns(sys.stdout) - 1) if is_terminal(sys.stdout) else text)


def _distinctive_first(checkpoints: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Checkpoints with a rare reason first: the final one, the best, the pinned."""
    shared = Counter(one["why"] for one in checkpoints)
    return sorted(checkpoints, key=lambda one: shared[one["why"]])


def _validate_command(run: RunDir, kept: Sequence[Mapping[str, Any]]) -> str:
    """The command that evaluates the run: by a glob, unless its checkpoints have another folder or name."""
    names = [one["name"] for one in kept]
    usual = any(parse_step(name) is not None for name in names) and all(
        (run.checkpoints_folder / name).is_dir() for name in names
    )
    return f"train validate {ckpt_argument(run.checkpoints_folder / 'step*' if usual else f'{run.path}@latest')}"
