"""What a fit prints at its end: how it ended, where its files are, and the next commands."""

from __future__ import annotations

import logging
import math
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainer_cli.config import Composed
from trainer_cli.errors import without_secrets
from trainer_cli.layout import parse_step
from trainer_cli.running.start import Done
from trainer_cli.runs import BestSettings, Outcome, RunDir
from trainer_cli.selection import ckpt_argument
from trainer_cli.terminal import (
    cell_width,
    clear_status,
    columns,
    format_clock,
    format_count,
    format_first,
    format_rate,
    is_terminal,
    padded,
    wrapped,
)

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer

log = logging.getLogger(__name__)

_MAX_METRICS = 12
_MAX_NAME_WIDTH = 32
_MAX_PLAIN_SECONDS = 100
_AGAIN = "the same command"


def describe_best(composed: Composed, trainer: Trainer, best_metrics: Mapping[str, Any]) -> dict[str, str]:
    """Rows about the best checkpoint on the disk; none if no checkpoint was saved at an evaluation.

    Args:
        best_metrics: for each metric the best value of the run and its step, as in `summary.json`.
    """
    # Imported here: it imports torch, which a finished run does not need.
    from trainer_cli.callbacks import CheckpointerCallback

    checkpoint = trainer.checkpoint
    if not isinstance(checkpoint, CheckpointerCallback) or not composed.config.checkpoint.enabled:
        return {}
    try:
        saved = checkpoint.retention.facts(None)
    except OSError as error:
        log.warning("cannot list the checkpoints: %s", error)
        return {}
    settings = BestSettings.of(asdict(composed.config))
    rule = settings.rule(name for entry in saved for name in entry.metrics)
    best = next(iter(rule.ranked(saved)), None) if rule is not None else None
    if rule is None or best is None:
        return {}
    # The best value of the run may be of a checkpoint that was removed, or of a step that was not saved.
    best_of_run = best_metrics.get(rule.metric, {"value": math.nan, "step": 0})
    values = {rule.metric: best_of_run["value"]}
    is_best = rule.value(values) is None or rule.loss(values) >= rule.loss(best.metrics)
    title = "best checkpoint" if is_best else "best of the kept"
    rows = {title: f"{checkpoint.folder / best.name} ({_format_metric(rule.metric, best.metrics)})"}
    if not is_best:
        cure = f"; checkpoint.keep_best.metric={rule.metric} keeps the best" if settings.metric is None else ""
        rows["better, not kept"] = f"step {best_of_run['step']:,} ({_format_metric(rule.metric, values)}){cure}"
    return rows


def _format_metric(metric: str, values: Mapping[str, float]) -> str:
    """The name and value of a metric."""
    return f"{metric} {values[metric]:.4g}"


def print_already_finished(run: RunDir, done: Done) -> None:
    """Print that a finished run was started again."""
    clear_status()
    _print(f"{run.path} is finished at step {done.step:,} ({done.end.reason}); nothing to do{done.note}.")
    kept = run.read_summary().get("checkpoints")
    _print(f"{done.end.how_to_reopen()}{'; to evaluate:' if kept else '.'}")
    if kept:
        _print(f"  {validate_command(run, kept)}", wraps=False)


def print_outcome(
    run: RunDir,
    outcome: Outcome,
    metrics: Mapping[str, float],
    best: Mapping[str, str] = MappingProxyType({}),
    naming_again: Callable[[str], str] = str,
    *,
    comes_again: bool = False,
) -> None:
    """Print how the run ended, where its files are, and the next commands.

    Args:
        best: rows about the best checkpoint.
        naming_again: see `Composed`.
        comes_again: whether the same command would end here again.
    """
    rate = outcome.throughput.get("samples_per_s", 0.0)
    seconds = outcome.wall_time_s
    duration = f"{seconds:.1f}s" if seconds < _MAX_PLAIN_SECONDS else format_clock(seconds)
    ended = f"{outcome.status} at step {outcome.step:,}: {outcome.reason}"
    _print(f"\n{ended} ({duration}, {format_rate(rate)} samples/s)")
    validation = [key for key in metrics if not key.startswith("train/")]
    # Metrics with a best value first, else in their order: the sort is stable.
    validation.sort(key=lambda key: key not in outcome.best_metrics)
    if outcome.average is not None and validation:
        _print(f"  {'evaluated':<16} the average of {outcome.average}, not the trained weights")
    widths = map(cell_width, validation[:_MAX_METRICS])
    width = max([16, *(key_width for key_width in widths if key_width <= _MAX_NAME_WIDTH)])
    for key in validation[:_MAX_METRICS]:
        best_value = outcome.best_metrics.get(key)
        note = f"  (best {best_value['value']:.4g} at step {best_value['step']:,})" if best_value else ""
        _print(f"  {padded(key, width)} {metrics[key]:<9.4g}{note}".rstrip())
    if len(validation) > _MAX_METRICS:
        _print(f"  and {format_count(len(validation) - _MAX_METRICS, 'more metric')} in {run.summary_file}")
    _print(f"  {'run directory':<16} {run.path}")
    for title, text in best.items():
        _print(f"  {title:<16} {text}")
    if outcome.checkpoints:
        # Checkpoints with a rare reason first: the final one, the best, the pinned.
        reasons = Counter(checkpoint["why"] for checkpoint in outcome.checkpoints)
        rarest = sorted(outcome.checkpoints, key=lambda checkpoint: reasons[checkpoint["why"]])
        names = [f"{checkpoint['name']} ({checkpoint['why']})" for checkpoint in rarest]
        _print(f"  {'checkpoints':<16} {format_first(names, 4)}")
    if outcome.status == "finished":
        commands = [validate_command(run, outcome.checkpoints)] if outcome.checkpoints else []
        commands.append(f"train serve {shlex.quote(str(run.path.parent))}")
        _print("\n  ".join(["next:", *commands]), wraps=False)
        if (again := naming_again(_AGAIN)) != _AGAIN:
            _print(f"from now on, give {again}: with anew, this run is moved away, too.")
    elif not comes_again:
        _print(naming_again("next: run the same command again to resume from here."))
    sys.stdout.flush()


def _print(text: str, *, wraps: bool = True) -> None:
    """Print to stdout without values from the environment.

    Args:
        wraps: on a terminal wrap between words; not a command, which is copied as a whole.
    """
    text = without_secrets(text)
    print(wrapped(text, columns(sys.stdout) - 1) if wraps and is_terminal(sys.stdout) else text)


def validate_command(run: RunDir, kept: Sequence[Mapping[str, Any]]) -> str:
    """The command that evaluates the run: by a glob, unless its checkpoints have another folder or name."""
    names = [checkpoint["name"] for checkpoint in kept]
    has_default_names = any(parse_step(name) is not None for name in names)
    if has_default_names and all((run.checkpoints_folder / name).is_dir() for name in names):
        return f"train validate {ckpt_argument(run.checkpoints_folder / 'step*')}"
    return f"train validate {ckpt_argument(f'{run.path}@latest')}"
