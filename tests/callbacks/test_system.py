"""The SystemMonitor: what it writes, beside what, and that it holds nothing up."""

from __future__ import annotations

import errno
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny

from trainer_cli.callbacks import system
from trainer_cli.callbacks.nvml import Nvml
from trainer_cli.callbacks.system import SYSTEM_FILE, SystemMonitor, Usage, open_nvml
from trainer_cli.errors import ConfigError
from trainer_cli.files.durable import AppendedFile
from trainer_cli.loggers.text_files import JsonlLogger

STAT = "cpu  {} 0 100 {} 50 0 0 0 0 0\ncpu0 1 2 3 4 5\n"


def fit(folder: Path, *, interval_s: float, loops: int = 1, sleep_s: float = 0.0, **more: Any) -> list[dict[str, Any]]:
    """The lines that a monitored fit has written."""
    trainer = tiny.trainer(
        callbacks=[
            SystemMonitor(interval_s),
            tiny.on(on_train_batch_end=lambda *arguments: time.sleep(sleep_s)),
        ],
        run_dir=folder,
        **more,
    )
    for _ in range(loops):
        trainer.fit(tiny.loader(), ckpt_path=None)
    assert "system-monitor" not in {thread.name for thread in threading.enumerate()}
    file = folder / SYSTEM_FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_lines_hold_the_step_and_what_the_machine_tells(tmp_path: Path) -> None:
    lines = fit(tmp_path, interval_s=0.1, sleep_s=0.05)
    assert lines
    assert {"step", "epoch", "time", "process_cpu_percent", "disk_free_bytes"} <= set(lines[0])
    assert 0 <= lines[0]["step"] <= 6
    assert not any(key.startswith("gpu") for key in lines[0])


def test_a_fit_shorter_than_the_interval_writes_nothing_and_does_not_wait_for_it(tmp_path: Path) -> None:
    assert fit(tmp_path, interval_s=3600) == []


def test_records_are_the_same_with_and_without_it(tmp_path: Path) -> None:
    loggers = tiny.ListLogger(), tiny.ListLogger()
    fit(tmp_path, interval_s=0.1, sleep_s=0.05, loggers=[loggers[0]], settings={"log_interval": 2})
    tiny.trainer(loggers=[loggers[1]], settings={"log_interval": 2}).fit(tiny.loader())
    assert loggers[0].stream == loggers[1].stream != []


def test_a_torn_last_line_is_ended_and_later_fits_append(tmp_path: Path) -> None:
    (tmp_path / SYSTEM_FILE).write_text('{"step": 1}\n{"ste')
    tiny.trainer(
        callbacks=[SystemMonitor(0.1), tiny.on(on_train_batch_end=lambda *arguments: time.sleep(0.05))],
        loggers=[JsonlLogger()],
        run_dir=tmp_path,
    ).fit(tiny.loader())
    lines = (tmp_path / SYSTEM_FILE).read_text().splitlines()
    assert lines[:2] == ['{"step": 1}', '{"ste']
    assert json.loads(lines[2])["step"] >= 0


def test_an_error_in_the_fit_ends_the_thread_and_a_folder_that_is_gone_ends_no_fit(tmp_path: Path) -> None:
    trainer = tiny.trainer(
        callbacks=[SystemMonitor(0.1), tiny.recorder([], fail_in=("on_train_start",))], run_dir=tmp_path
    )
    with pytest.raises(RuntimeError):
        trainer.fit(tiny.loader())
    assert fit(tmp_path / "missing", interval_s=0.1, sleep_s=0.05) == []


def test_a_file_that_cannot_be_opened_at_first_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.ENOSPC, "No space left on device") for _ in range(2)]

    def open_later(file: Path) -> AppendedFile:
        if failures:
            raise failures.pop()
        return AppendedFile(file)

    monkeypatch.setattr(system, "AppendedFile", open_later)
    written = threading.Event()
    wait = tiny.on(on_train_batch_end=lambda *arguments: written.wait(600))
    monkeypatch.setattr(AppendedFile, "append", lambda file, content: written.set())
    tiny.trainer(callbacks=[SystemMonitor(0.1), wait], run_dir=tmp_path).fit(tiny.loader())
    assert written.is_set()


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_that_is_no_time_is_refused(interval_s: float) -> None:
    with pytest.raises(ConfigError, match="interval_s is"):
        SystemMonitor(interval_s)


def test_usage_is_the_rise_of_the_counters_since_the_reading_before(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "stat").write_text(STAT.format(100, 200))
    (tmp_path / "self/io").write_text("read_bytes: 1000\nwrite_bytes: 0\n")
    (tmp_path / "self/statm").write_text("900 25 3")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    usage = Usage(tmp_path, tmp_path)
    usage._last["clock_s"] -= 100
    (tmp_path / "stat").write_text(STAT.format(130, 270))
    (tmp_path / "self/io").write_text("read_bytes: 3000\nwrite_bytes: 0\n")
    values = dict(usage.read())
    assert values["cpu_percent"] == 30
    assert values["process_read_bytes_per_s"] == pytest.approx(20, rel=0.05)
    assert values["process_write_bytes_per_s"] == 0
    assert values["memory_free_bytes"] == 4096
    assert values["process_memory_bytes"] % 25 == 0


def test_without_linux_counters_the_others_are_read(tmp_path: Path) -> None:
    assert set(dict(Usage(tmp_path, tmp_path / "missing").read())) == {"process_cpu_percent", "disk_free_bytes"}


class Driver:
    """Stands for NVML's library: GPU `a` reports all, `b` no power, and there is no other."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def nvmlInit_v2(self) -> int:
        return self.code

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = {b"GPU-a": 1, b"GPU-b": 2}.get(uuid)
        return 0 if handle._obj.value else 6

    def nvmlDeviceGetUtilizationRates(self, handle: Any, use: Any) -> int:
        use._obj.gpu = 90
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.used = 2**35
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, power: Any) -> int:
        power._obj.value = 250_500
        return 0 if handle.value == 1 else 3

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, celsius: Any) -> int:
        celsius._obj.value = 60
        return 0


def test_gpus_are_found_by_their_uuid_and_what_one_does_not_report_is_left_out() -> None:
    first = {"gpu0_percent": 90, "gpu0_memory_bytes": 2**35, "gpu0_power_w": 250.5, "gpu0_temperature_c": 60}
    second = {"gpu3_percent": 90, "gpu3_memory_bytes": 2**35, "gpu3_temperature_c": 60}
    assert dict(Nvml({0: "a", 3: "b", 5: "c"}, Driver()).read()) == {**first, **second}


def test_a_driver_that_does_not_start_is_an_error_which_the_monitor_passes_over() -> None:
    with pytest.raises(OSError, match="nvmlInit_v2 returned 9"):
        Nvml({0: "a"}, Driver(9))
    assert open_nvml(tiny.trainer()) is None, "on the CPU"
