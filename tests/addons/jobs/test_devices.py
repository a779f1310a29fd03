"""Devices are listed as the driver and CUDA_VISIBLE_DEVICES have them, and a job's device is no other job's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_cli.addons.jobs.devices import ALL_DEVICES, Devices, choose_devices, hold, list_devices
from trainer_cli.errors import UserError

TWO = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa-0)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb-1)
"""
DIVIDED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa-0)
  MIG 3g.20gb     Device  0: (UUID: MIG-cccc)
  MIG 1g.5gb      Device  1: (UUID: MIG-dddd)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb-1)
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def install_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """Put a stand-in for NVIDIA's program first on the path."""
    program = folder / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && cat <<'END'\n{lines}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("lines", "visible", "expected"),
    [
        (TWO, None, {"0": "GPU-aaaa-0", "1": "GPU-bbbb-1"}),
        (DIVIDED, None, {"MIG-cccc": "MIG-cccc", "MIG-dddd": "MIG-dddd", "1": "GPU-bbbb-1"}),
        (TWO, "1", {"1": "GPU-bbbb-1"}),
        (TWO, "GPU-bbbb,0", {"GPU-bbbb": "GPU-bbbb-1", "0": "GPU-aaaa-0"}),
        (DIVIDED, "MIG-dddd", {"MIG-dddd": "MIG-dddd"}),
        ("", "MIG-GPU-x/1/0, 5", {"MIG-GPU-x/1/0": "MIG-GPU-x/1/0", "5": "5"}),
        (TWO, "", {}),
        (TWO, "-1", {}),
        ("Failed to initialize NVML: Driver/library version mismatch\n", None, {}),
    ],
)
def test_devices_are_those_of_the_variable_or_else_of_the_driver(
    lines: str, visible: str | None, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_driver(tmp_path, monkeypatch, lines)
    assert list_devices(visible) == expected


def test_without_the_drivers_program_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_devices(None) == {}
    with pytest.raises(UserError, match=r"no GPU that can be seen\. nvidia-smi lists none here; CUDA_VISIBLE_DEVICES"):
        choose_devices(ALL_DEVICES, 1, settings={"auto"}, processes=1)


@pytest.mark.parametrize(
    ("wanted", "settings", "expected"),
    [
        (None, {"auto"}, "0, 1"),
        (None, {"auto", "cuda"}, "0, 1"),
        (None, {"auto", "cpu"}, "None"),
        (None, {"cuda:1"}, "None"),
        ("all", {"cpu"}, "0, 1"),
        ("1", {"auto"}, "1"),
        ("1,0", {"auto"}, "1, 0"),
        ("GPU-bbbb-1", {"auto"}, "GPU-bbbb-1"),
    ],
)
def test_jobs_are_given_devices_where_there_are_several_or_when_asked_for(
    wanted: str | None, settings: set[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_driver(tmp_path, monkeypatch, TWO)
    assert str(choose_devices(wanted, 1, settings=settings, processes=1)) == expected


def test_one_device_alone_is_shared_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(tmp_path, monkeypatch, TWO.splitlines(keepends=True)[0])
    assert choose_devices(None, 1, settings={"auto"}, processes=1) is None


@pytest.mark.parametrize(
    ("wanted", "per_device", "settings", "processes", "message"),
    [
        ("7", 1, {"auto"}, 1, r"--devices is 7, but there is no device '7'\. There are: 0, 1\."),
        ("0,", 1, {"auto"}, 1, r"there is no device ''"),
        ("0", 1, {"auto", "cuda:1"}, 1, r"device=cuda:1 and --devices both choose the GPU"),
        ("0", 2, {"auto"}, 2, r"a run of 2 processes needs as many devices, but is given 0 .*There are: 0, 1\."),
    ],
)
def test_a_mistake_names_the_devices_that_there_are(
    wanted: str, per_device: int, settings: set[str], processes: int, message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install_driver(tmp_path, monkeypatch, TWO)
    with pytest.raises(UserError, match=message):
        choose_devices(wanted, per_device, settings=settings, processes=processes)


def test_each_device_gets_a_first_job_before_one_gets_a_second() -> None:
    devices = Devices({"0": "GPU-a", "1": "GPU-b"}, per_device=2)
    taken = [devices.take(str(job), 1) for job in range(5)]
    assert [one.names if one else None for one in taken] == ["0", "1", "0", "1", None]
    devices.release("1")
    assert devices.names("1") == ""
    assert devices.take("2 processes", 2) is None, "both would be on one device"
    again = devices.take("5", 1)
    assert again is not None
    assert again.names == "1"


def test_a_job_of_two_processes_has_two_devices_or_waits() -> None:
    devices = Devices({"0": "GPU-a", "1": "GPU-b", "2": "GPU-c"})
    first = devices.take("a", 2)
    assert first is not None
    assert first.names == "0,1"
    assert devices.take("b", 2) is None
    third = devices.take("c", 1)
    assert third is not None
    assert third.names == "2", "what was not enough is free again"


def test_two_commands_share_the_devices_under_all_of_their_names() -> None:
    first, second = Devices({"0": "GPU-a"}), Devices({"GPU-a": "GPU-a", "MIG-GPU-x/1/0": "MIG-GPU-x/1/0"})
    assert first.take("job", 1) is not None
    taken = second.take("job", 1)
    assert taken is not None
    assert taken.names == "MIG-GPU-x/1/0"
    first.release("job")
    assert second.take("other", 1) is not None


def test_a_device_is_free_when_the_last_process_of_its_job_has_ended() -> None:
    devices = Devices({"0": "GPU-a"})
    taken = devices.take("job", 1)
    assert taken is not None
    program = (
        "import sys; from pathlib import Path; from trainer_cli.addons.jobs.devices import hold\n"
        "hold(map(Path, sys.argv[1:])); print('holds', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", program, *map(str, taken.locks)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        devices.release("job")
        assert devices.take("next", 1) is None
        process.kill()
        process.wait()
        assert devices.take("next", 1) is not None


def test_numbers_are_those_of_nvidia_smi_unless_the_user_says_of_what(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Devices({"0": "GPU-a"}).take("job", 1)
    assert taken is not None
    hold(taken.locks)
    assert taken.variables() == {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    for name, value in (("CUDA_VISIBLE_DEVICES", "0,1"), ("CUDA_DEVICE_ORDER", "FASTEST_FIRST")):
        monkeypatch.setenv(name, value)
        assert taken.variables() == {"CUDA_VISIBLE_DEVICES": "0"}
        monkeypatch.delenv(name)
