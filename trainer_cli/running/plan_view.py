"""Show a plan as text (a summary, a chart of the steps, a table of the checkpoints) or as JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer_cli.goodput import ProbedTimes
from trainer_cli.loads import describe_left_out
from trainer_cli.policy import CheckpointKind, Timeline
from trainer_cli.running.failures import BestInterval
from trainer_cli.running.planning import Plan
from trainer_cli.running.start import Done
from trainer_cli.terminal import format_bytes, format_clock, format_count, line_width, painted, table

_MAX_WIDTH = 64
_MAX_ROWS = 40


def describe_plan(plan: Plan | Mapping[str, Plan], *, as_json: bool = False) -> str:
    """A plan, or the plan of each job of a sweep by its key, for a person or as JSON."""
    if as_json:
        values = as_dict(plan) if isinstance(plan, Plan) else {key: as_dict(job) for key, job in plan.items()}
        return json.dumps(values, indent=2)
    return shown(plan) if isinstance(plan, Plan) else sweep_table(plan)


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, for JSON. Every list is complete and sorted by time."""
    line, start, start_point = plan.timeline, plan.start, plan.start_point
    done = isinstance(start, Done)
    return {
        "run_dir": str(plan.run_dir),
        "does": "nothing" if done else "start" if start_point.progress.step == 0 else "go on",
        "reason": start.end.reason if isinstance(start, Done) else start.reason,
        "from": {
            "step": start_point.progress.step,
            "checkpoint": None if start_point.path is None else str(start_point.path),
            "changes": [] if isinstance(start, Done) else [str(change) for change in start.changes],
            "on_disk": [
                {
                    "name": saved.name,
                    "step": saved.step,
                    "kind": saved.kind.value,
                    "size_bytes": (start_point.sizes or {})[saved.name],
                }
                for saved in start_point.saved
            ],
            "left": list(start_point.newer),
        },
        "end": None if line.end is None else {"step": line.end.step, "epoch": line.end.epoch},
        "stop": None if line.stop is None else {"reason": line.stop.reason, "finished": line.stop.finished},
        "steps_per_epoch": plan.step_counts.steps_per_epoch,
        "evaluations": line.evaluations,
        "saves": [{**asdict(save), "size_bytes": save.size_bytes or None} for save in line.saves],
        "completed": [asdict(save) for save in line.completed.values()],
        "may_save": line.may_save,
        "removals": [asdict(removal) for removal in line.removals],
        "kept": [{"name": name, "why": why} for name, why in line.kept.items()],
        "peak": None if line.peak is None else asdict(line.peak),
        "at_most": None if plan.at_most is None else {"count": plan.at_most[0], "size_bytes": plan.at_most[1]},
        "left_out": list(plan.left_out),
        "checkpoint_bytes": plan.size.trained,
        "unfreezes": [asdict(unfreezing) for unfreezing in plan.unfreezes],
        "copies": plan.copies,
        "estimates": list(plan.estimates),
        "unknown": list(plan.unknown),
        "duration_s": plan.duration_s,
        "probed": None if plan.probed is None else asdict(plan.probed),
        "best_interval": None if plan.best_interval is None else asdict(plan.best_interval),
    }


def shown(plan: Plan) -> str:
    """The plan as text."""
    if isinstance(plan.start, Done):
        finished = (
            f"{plan.run_dir} is finished at step {plan.start.step} ({plan.start.end.reason}); a fit would do nothing"
            f"{plan.start.note}.\n"
            f"{plan.start.end.how_to_reopen()}."
        )
        return "\n\n".join([finished, *_describe_best_interval(plan.best_interval)])
    blocks = ["\n".join(map(_with_label, _summary(plan)))]
    if plan.timeline.end is not None:
        blocks += ["\n".join(map(_with_label, _chart(plan))), _describe_checkpoints(plan)]
    for title, lines in (("estimated", plan.estimates), ("not known before the run", plan.unknown)):
        if lines:
            blocks.append("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))
    blocks += _describe_best_interval(plan.best_interval)
    return "\n\n".join(block for block in blocks if block)


def _with_label(line: str) -> str:
    """A row with its label dim on a terminal."""
    return re.sub(r"^  \S.*?(?=  )", lambda match: painted(match[0], "dim", sys.stdout), line)


def _describe_best_interval(best: BestInterval | None) -> list[str]:
    """A block with the best interval of saves and where it is from; none if it was not asked for."""
    if best is None:
        return []
    lines = (
        f"with a failure every {best.between_failures_s:g} s on average:",
        f"  a save         stops training for {best.save_s:.3g} s ({best.source})",
        f"  best interval  {_format_interval(best)}",
        f"  lost           {100 * best.lost_share:.3g} % of the time, half for saves, half for repeated steps",
    )
    return ["\n".join(lines)]


def _format_interval(best: BestInterval | None) -> str:
    """The interval in seconds and steps; empty for None."""
    if best is None:
        return ""
    steps = "" if best.steps is None else f", {format_count(best.steps, 'step')}"
    return f"{best.interval_s:.3g} s{steps}"


def schedule_texts(
    line: Timeline, start_step: int, steps_per_epoch: int | None, metric: str | None = None
) -> dict[str, str]:
    """`steps`, `evaluations` and `saves` for the start of a training, as far as they are known beforehand.

    Args:
        metric: `checkpoint.keep_best.metric`.
    """
    if line.end is None or line.stop is None:
        return {}
    steps = f"{start_step:,} to {line.end.step:,} ({_describe_length(line.stop.reason, steps_per_epoch)})"
    if line.cut:
        first_saves = _shorten_steps([save.step for save in line.saves[:4]])
        saves = f"checkpoints at {first_saves}, … (`train plan` lists all of them)"
        return {"steps": steps, "saves": saves}
    more = f", up to {len(line.may_save):,} more for {metric}" if line.may_save else ""
    kept = f", {len(line.kept)} stay" if line.kept else ""
    return {
        "steps": steps,
        "evaluations": f"at {_shorten_steps(line.evaluations)}" if line.evaluations else "at no step",
        "saves": f"{_count_steps([save.step for save in line.saves], 'checkpoint')}{more}{kept}",
    }


def _describe_length(reason: str, steps_per_epoch: int | None) -> str:
    """The length that ends the training and, if it is another, the length of an epoch: `15 epochs of 45 steps`.

    `reason` is that of the end.
    """
    length = reason.removesuffix(" reached").removeprefix("max_duration of ")
    if steps_per_epoch is None or length == "1 epoch":
        return length
    if length.endswith("epochs"):
        return f"{length} of {format_count(steps_per_epoch, 'step')}"
    return f"{length}, {steps_per_epoch:,} an epoch"


def sweep_table(plans: Mapping[str, Plan]) -> str:
    """A row for each job of a sweep, and the sum of all jobs."""
    rows: list[tuple[str, ...]] = []
    for key, plan in plans.items():
        line, first = plan.timeline, plan.start_point.progress.step
        peak = "" if line.peak is None else _format_size(line.peak.count, line.peak.size_bytes)
        best = _format_interval(plan.best_interval)
        if isinstance(plan.start, Done):
            rows.append((key, f"finished at {first:,}", "", "", "", best))
        else:
            end = "?" if line.end is None else f"{line.end.step:,}"
            rows.append((key, f"{first:,} to {end}", f"{len(line.evaluations):,}", f"{len(line.saves):,}", peak, best))
    steps = sum(plan.timeline.end.step - plan.start_point.progress.step for plan in plans.values() if plan.timeline.end)
    most = sum(plan.timeline.peak.size_bytes for plan in plans.values() if plan.timeline.peak)
    header: tuple[str, ...] = ("job", "steps", "evaluations", "checkpoints", "on the disk at most", "best interval")
    if not any(plan.best_interval for plan in plans.values()):
        header, rows = header[:-1], [row[:-1] for row in rows]
    totals = [format_count(len(plans), "job"), format_count(steps, "step")]
    totals += [f"{format_bytes(most)} on the disk at most"] if most else []
    return f"{table(header, rows, right=header[2:4])}\n\n{', '.join(totals)}"


def _summary(plan: Plan) -> Iterator[str]:
    """The lines above the chart: the run, and a labelled line for each fact of the plan."""
    line, start_point, start = plan.timeline, plan.start_point, plan.start
    first = start_point.progress.step
    assert not isinstance(start, Done)
    yield f"{plan.run_dir}: {start.reason}"
    if start_point.path is not None and first:
        yield f"  resumes        {start_point.path} (step {first:,})"
    elif start_point.path is not None:
        yield f"  weights from   {start_point.path}"
    for change in start.changes:
        yield f"  changed        {change} (may change)"
    if start_point.newer:
        yield f"  goes back      {', '.join(start_point.newer)} would be removed"
    if line.end is None or line.stop is None:
        yield f"  steps          from {first:,}; its end is not known"
        return
    per_epoch = plan.step_counts.steps_per_epoch
    epochs = "" if per_epoch is None else f", epochs of {per_epoch:,}"
    yield f"  steps          {first:,} to {line.end.step:,}{epochs} ({line.stop.reason})"
    for unfreezing in plan.unfreezes:
        after = unfreezing.duration if unfreezing.step is None else f"step {unfreezing.step:,}"
        yield f"  unfreezes      {unfreezing.pattern} after {after}"
    yield f"  evaluations    {_list_steps(line.evaluations)}"
    yield f"  checkpoints    {_list_steps([save.step for save in line.saves])}"
    if line.may_save:
        yield f"  may also save  {_list_steps(line.may_save)}: where the metric is among the best"
    if line.peak is not None:
        most = _format_size(line.peak.count, line.peak.size_bytes)
        yield f"  on the disk    {len(line.kept)} at the end; at most {most}, at step {line.peak.step:,}"
    if plan.at_most is not None:
        yield f"                 with those that may be added, no more than {_format_size(*plan.at_most)}"
    if plan.copies is not None:
        yield f"  copied to      {plan.copies}"
    if plan.size.trained is not None:
        yield f"  each takes     {format_bytes(plan.size.trained)}"
    if plan.probed is not None:
        yield from _describe_probed(plan, plan.probed)
    if plan.left_out:
        yield f"  left out       {describe_left_out(plan.left_out)}"


def _describe_probed(plan: Plan, times: ProbedTimes) -> Iterator[str]:
    """How long the run will take, how sure that is, and the memory."""
    step_s = plan.step_counts.step_time_s or times.step_s
    if plan.duration_s is not None and plan.timeline.end is not None:
        training_s = (plan.timeline.end.step - plan.start_point.progress.step) * step_s
        sureness = "" if times.spread is None else f" ± {format_clock(training_s * times.spread)}"
        yield f"  will take      {format_clock(plan.duration_s)}{sureness}"
    pauses = f"evaluation {times.evaluation_s:.3g} s, save {times.save_s:.3g} s"
    steps = f"step {times.step_s:.3g} s (mean of {times.steps:,})"
    yield f"  measured       start {times.start_s:.3g} s, {steps}, {pauses}"
    device = "" if times.device_bytes is None else f", {format_bytes(times.device_bytes)} on the GPU"
    yield f"  memory         {format_bytes(times.memory_bytes)}{device}"


def _chart(plan: Plan) -> Iterator[str]:
    """A row for each kind of event, the steps from left to right."""
    line = plan.timeline
    assert line.end is not None
    first, last = plan.start_point.progress.step, line.end.step
    fixed = [save.step for save in line.saves if save.reason.startswith("fixed step")]
    final = [save.step for save in line.saves if save.reason == "end of training"]
    periodic = [save for save in line.saves if save.step not in (*fixed, *final)]
    rows = {
        "evaluations": ("|", line.evaluations),
        "regular": ("R", [save.step for save in periodic if save.kind is CheckpointKind.regular]),
        "fixed": ("F", fixed),
        "final": ("E", final),
        "ephemeral": ("e", [save.step for save in periodic if save.kind == "ephemeral"]),
        "perhaps": ("?", line.may_save),
        "removals": ("x", [removal.step for removal in line.removals]),
    }
    first_text, last_text = f"{first:,}", f"{last:,}"
    width = max(min(_MAX_WIDTH, line_width(sys.stdout) - 15), 8)
    yield f"  {'step':<13}{first_text}{' ' * max(1, width - len(first_text) - len(last_text))}{last_text}"
    for title, (mark, steps) in rows.items():
        if steps:
            marked = {_column(step, first, last, width) for step in steps}
            yield f"  {title:<13}{''.join(mark if column in marked else '.' for column in range(width))}"


def _describe_checkpoints(plan: Plan) -> str:
    """A table with a row for each checkpoint, the middle of a long one left out; empty without checkpoints."""
    line = plan.timeline
    outcomes = {removal.name: f"removed at {removal.step:,}: {removal.reason}" for removal in line.removals}
    outcomes |= {name: f"stays: {why}" for name, why in line.kept.items()}
    rows = [
        (saved.name, saved.kind.value, "on the disk now", outcomes.get(saved.name, ""))
        for saved in plan.start_point.saved
    ]
    rows += [(save.name, save.kind.value, save.reason, outcomes.get(save.name, "")) for save in line.saves]
    hidden = len(rows) - _MAX_ROWS
    if hidden > 0:
        half = _MAX_ROWS // 2
        rows = [*rows[:half], (f"… {hidden} more", "", "", "(--json lists all)"), *rows[-half:]]
    return table(("checkpoint", "kind", "why", "kept or removed"), rows, indent="  ") if rows else ""


def _column(step: int, first: int, last: int, width: int) -> int:
    """The column of a step in a chart of this width, from `first` to `last`."""
    return 0 if last == first else (step - first) * (width - 1) // (last - first)


def _list_steps(steps: Sequence[int]) -> str:
    """How many steps, and some of them; `none` without any."""
    return f"{len(steps):,}: {_shorten_steps(steps)}" if steps else "none"


def _count_steps(steps: Sequence[int], noun: str) -> str:
    """The number of things at these steps, each called `noun`, and some of the steps."""
    return f"{format_count(len(steps), noun)} ({_shorten_steps(steps)})" if steps else f"no {noun}"


def _shorten_steps(steps: Sequence[int]) -> str:
    """The first few steps and the last one."""
    texts = [f"{step:,}" for step in steps]
    return ", ".join(texts if len(texts) <= 6 else [*texts[:3], "…", texts[-1]])


def _format_size(count: int, size_bytes: int) -> str:
    """A number of checkpoints, and their size if it is known."""
    return f"{count:,}{f', {format_bytes(size_bytes)}' if size_bytes else ''}"
