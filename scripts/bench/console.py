"""What people look at: the cost of the bar and of the system monitor in a step of a tiny network, and what `train top`
of ten runs takes of a core.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from contenders import FIT
from settings import Settings
from table import Column, Row, Table
from timing import HERE, Skipped, environment, interleaved, last_words, processor_s

_MONITOR_S = 0.1
CONSOLES = {
    "no console": ("logging.console=off", "callbacks.system=null"),
    "bar": ("logging.console=rich", "callbacks.system=null"),
    "bar and monitor": ("logging.console=rich", f"+callbacks.system.interval_s={_MONITOR_S}"),
}
"""Overrides of each contender."""
RUNS = 10
_PULSE_S = 0.5
"""How often each of the ten runs writes a record."""
_STARTED_S = 5.0


def measure(settings: Settings) -> list[Table]:
    """A table of the bar, and one of `train top`."""
    return [_bar(settings), _top(settings)]


def _bar(settings: Settings) -> Table:
    steps, warm = settings.pick(smoke=(60, 20), quick=(20_000, 2_000), whole=(30_000, 3_000))
    measures = {name: partial(_trained, overrides, steps, warm) for name, overrides in CONSOLES.items()}
    samples, skipped = interleaved(measures, settings.rounds_or(3, 3), warm=0, needed=list(CONSOLES))
    rows = [Row(name, {"step": found["step"], "processor": found["processor"]}) for name, found in samples.items()]
    for row in rows:
        for column in ("step", "processor"):
            base = samples["no console"][column]
            row.samples[f"{column}, over base"] = [
                own - other for own, other in zip(samples[row.name][column], base, strict=True)
            ]
    rows[list(samples).index("bar")].samples["a drawing"] = _drawings(settings.pick(smoke=5, quick=200, whole=200))
    columns = [Column("step", "µs", 1, resolution=5.0), Column("step, over base", "µs", 1, resolution=5.0, ratio=False)]
    columns += [Column(one.name.replace("step", "processor", 1), "µs", 1, 5.0, one.ratio) for one in columns]
    columns.append(Column("a drawing", "µs", 0, 100.0, ratio=False))
    note = (
        "On a terminal of 80 columns that is read at once, with the shipped loggers otherwise. A drawing is processor "
        f"time, four times a second. The system monitor reads every {_MONITOR_S} s here, a hundred times as often as "
        "by default. Goal: both below 5 µs."
    )
    return Table("bar", "A step with the bar", "no console", columns, rows, {"steps": steps}, skipped, [note])


def _drawings(count: int) -> list[float]:
    """Microseconds of the processor that a drawing takes, in five samples of `count`."""
    import io

    from trainer_cli.loggers.base import Now, RunFacts
    from trainer_cli.loggers.progress_bar import ProgressBar

    bar, found = ProgressBar(io.StringIO(), RunFacts(total_steps=1_000_000)), []
    for sample in range(5):
        began = time.process_time()
        for step in range(count * sample, count * sample + count):
            bar.text(Now(10 * step, 320 * step), step / 4, 79)
        found.append((time.process_time() - began) / count * 1e6)
    return found


def _trained(overrides: Sequence[str], steps: int, warm: int) -> dict[str, float]:
    """What the network's clock saw in a process of its own, on a terminal of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seen.json"
        env = {
            "BENCH_STEPS": str(steps), "BENCH_WARM": str(warm), "BENCH_RESULT": str(result), "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "TERM": "xterm-256color",
        }  # fmt: skip
        command = (*FIT, f"loop.max_duration={steps}", *overrides)
        with _on_terminal(command, env, folder) as (process, shown):
            if process.wait(900) != 0:
                raise Skipped(f"failed: {last_words(shown())}")
        found: dict[str, float] = json.loads(result.read_text())
        return found


def _top(settings: Settings) -> Table:
    watched_s = settings.pick(smoke=1.0, quick=10.0, whole=8.0)
    measures = {
        f"{RUNS} running runs": partial(_watching, watched_s, running=True),
        "nothing": partial(_watching, watched_s, running=False),
    }
    samples, skipped = interleaved(measures, settings.rounds_or(1, 2), warm=0)
    rows = [Row(name, found) for name, found in samples.items()]
    columns = [Column("of a core", "%", 2, resolution=0.5)]
    note = f"Each run writes a record every {_PULSE_S:g} s; the table is drawn every 2 s. Goal: below 2 %."
    return Table("top", "`train top`", "nothing", columns, rows, {"seconds": watched_s}, skipped, [note])


def _watching(watched_s: float, *, running: bool) -> dict[str, float]:
    """Processor time of `train top` once it shows its table, as a share of the time that passes."""
    if sys.platform != "linux":
        raise Skipped("the processor time of another process is read from /proc")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "runs").mkdir()
        runs = (
            subprocess.Popen([sys.executable, str(HERE / "console.py"), folder], env=environment()) if running else None
        )
        try:
            with _on_terminal((sys.executable, "-m", "trainer_cli", "top"), {"TERM": "xterm"}, folder) as (top, shown):
                time.sleep(_STARTED_S)
                if running and f"{RUNS} running" not in shown():
                    raise Skipped(f"it does not show them: {last_words(shown())}")
                before, began = processor_s(top.pid), time.monotonic()
                time.sleep(watched_s)
                share = (processor_s(top.pid) - before) / (time.monotonic() - began)
                top.send_signal(signal.SIGINT)
                top.wait(30)
        finally:
            if runs is not None:
                runs.kill()
                runs.wait()
    return {"of a core": 100 * share}


@contextmanager
def _on_terminal(
    command: Sequence[str], env: dict[str, str], cwd: str
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """A process on a pseudo-terminal that a thread reads; and what gives the text that it has shown."""
    import fcntl
    import struct
    import termios

    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    parts: list[bytes] = []

    def read() -> None:
        while True:
            try:
                parts.append(os.read(master, 1 << 16))
            except OSError:  # The other end is closed.
                return

    whole = {**environment(), **env}
    process = subprocess.Popen(
        command, cwd=cwd, env=whole, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process, lambda: b"".join(parts).decode(errors="replace")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join(10)
        os.close(master)


def ten_runs(folder: str) -> None:
    """Hold the locks of ten runs, and append to their metrics, until killed."""
    from trainer_cli.runs.run_dir import RunDir

    paths = [Path(folder) / "runs" / f"run{number}" for number in range(RUNS)]
    locks = []
    for path in paths:
        run = RunDir(path)
        locks.append(run.create("name: x\ncheckpoint:\n  folder: null\n", [], {"run_id": "x"}))
        run.begin_attempt(name="x", start_step=0, now=time.time(), environment={})
        run.record_total_steps(1_000_000)
    step = 0
    while True:
        step += 50
        for path in paths:
            with open(path / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "epoch": 0.0, "time": time.time(), "train/loss": 1 / step}) + "\n")
        time.sleep(_PULSE_S)


if __name__ == "__main__":
    ten_runs(sys.argv[1])
