"""What a run left behind, and whether two runs left the same."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

_TIMES = ("time", "train/samples_per_s")


def checkpoints(run: Path) -> list[str]:
    """The checkpoints on the disk, by step."""
    return sorted((path.name for path in run.glob("checkpoints/step*")), key=lambda name: int(name[4:]))


def final_state(run: Path) -> dict[str, Any]:
    """Everything in the newest checkpoint, bit for bit, but the seconds that training took."""
    folder = run / "checkpoints" / checkpoints(run)[-1]
    state = json.loads((folder / "rank0.json").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("seconds", "last_seconds"):
        del state["state"]["progress"][name]
    progress, loop = state["state"]["progress"], state["state"].get("loop", {})
    # A stop in the last step saves the state before the evaluation. The next start makes it and completes the manifest,
    # whose metrics are compared; the state stays, as a committed one is never rewritten.
    if loop.get("owed_record") is not None:
        loop["owed_record"], progress["evaluated_step"] = None, progress["step"]
        loop.pop("owed_at_end", None)
    # Nor does that state know of an end by a callback in that evaluation; manifest and summary have it.
    loop.pop("ended", None)
    # Of the logs only what was measured: sizes and digests depend on the clock, which is in the records.
    marks = state["state"].pop("log_marks", {})
    return {
        "name": folder.name,
        "metrics": {key: value for key, value in manifest["metrics"].items() if key not in _TIMES},
        "finished": manifest["finished"],
        "ranges": marks.get("jsonl", {}).get("ranges"),
        "state": state,
        **tensors(folder / "rank0.safetensors"),
    }


def tensors(path: Path) -> dict[str, Any]:
    """Type, shape and bytes of every tensor in a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length :]
    return {name: (one["dtype"], one["shape"], data[slice(*one["data_offsets"])]) for name, one in header.items()}


def metrics(run: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without what depends on the clock."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in _TIMES} for record in records]


def points(run: Path) -> dict[tuple[str, int], float | str]:
    """Every point that TensorBoard shows, each once, without what depends on the clock. A NaN is `nan`, so that two
    are equal."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    if not (run / "tensorboard").is_dir():
        return {}
    shown = EventAccumulator(str(run / "tensorboard"), size_guidance={SCALARS: 0}).Reload()
    found = [((tag, one.step), one.value) for tag in shown.Tags()[SCALARS] for one in shown.Scalars(tag)]
    doubled = [point for point, count in Counter(point for point, _ in found).items() if count > 1]
    assert not doubled
    return {point: "nan" if math.isnan(value) else value for point, value in found if point[0] not in _TIMES}


def leftovers(run: Path) -> list[str]:
    """Hidden files and folders that a run at its end has no use for."""
    # Where nothing is removed, a run that began anew has its first checkpoint aside.
    hidden = [path for path in run.rglob(".*") if path != run / ".lock" and not path.match(".aside.step0.*")]
    return sorted(str(path.relative_to(run)) for path in hidden)


def content(run: Path) -> dict[str, tuple[int, bytes | None]]:
    """Every path of a run, hidden ones too, with its time of change and its bytes."""
    return {
        str(path.relative_to(run)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [run, *run.rglob("*")]
    }


def assert_same_state(run: Path, reference: Path) -> None:
    """Bit-identical final states."""
    found, wanted = final_state(run), final_state(reference)
    if _owes_evaluation(run):
        _leave_out_evaluation(found["state"]["state"])
        _leave_out_evaluation(wanted["state"]["state"])
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []


def _owes_evaluation(run: Path) -> bool:
    """Whether the newest state was saved by a stop before the evaluation of its step."""
    state = json.loads((run / "checkpoints" / checkpoints(run)[-1] / "rank0.json").read_text())["state"]
    return state.get("loop", {}).get("owed_record") is not None


def _leave_out_evaluation(state: dict[str, Any]) -> None:
    """Drop what an evaluation changes in schedules and early stopping; a longer training makes that evaluation."""
    state.get("callbacks", {}).pop("early_stopping", None)
    plateaus = [schedule for schedule in state.get("schedulers", {}).values() if schedule["interval"] == "evaluation"]
    for schedule in plateaus:
        del schedule["state"]
    if plateaus:
        optimizer = state["optimizer"]
        for group in optimizer["groups"]:
            del group["lr"]


def assert_same_run(run: Path, reference: Path, *, same_checkpoints: bool = True) -> None:
    """The same final state, metrics, events and checkpoints, nothing left over, and a summary that says so.

    Without `same_checkpoints` the older checkpoints may be others: a save that failed was tolerated.
    """
    assert_same_state(run, reference)
    assert metrics(run) == metrics(reference)
    assert points(run) == points(reference)
    assert not same_checkpoints or checkpoints(run) == checkpoints(reference)
    assert leftovers(run) == []
    summary, wanted = (json.loads((path / "summary.json").read_text()) for path in (run, reference))
    for key in ("status", "reason", "step", "best_metrics", *(["checkpoints"] if same_checkpoints else [])):
        assert summary[key] == wanted[key]
