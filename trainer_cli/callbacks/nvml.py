"""Use, memory, power and temperature of NVIDIA GPUs, from the library of their driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_CORE_TEMPERATURE = 0


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Nvml:
    """The library, and the GPUs that are read.

    Args:
        uuids: as `torch.cuda.get_device_properties(index).uuid`, by index.
        library: None: that of the driver.

    Raises:
        OSError: there is no such library, or it cannot be used.
    """

    def __init__(self, uuids: dict[int, str], library: Any = None) -> None:
        self._library: Any = ctypes.CDLL(_LIBRARY) if library is None else library
        if (code := self._library.nvmlInit_v2()) != 0:
            raise OSError(f"nvmlInit_v2 returned {code}")
        self._handles: dict[int, ctypes.c_void_p] = {}
        """By torch's index of a GPU."""
        for index, uuid in uuids.items():
            handle = ctypes.c_void_p()
            # By its uuid: CUDA_VISIBLE_DEVICES changes the indices of torch, and not those of the library.
            if self._library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) == 0:
                self._handles[index] = handle

    def read(self) -> Iterator[tuple[str, float]]:
        """Name and value of each quantity; what a GPU does not report, such as a part of one (MIG), is left out."""
        for index, handle in self._handles.items():
            if (use := self._value("nvmlDeviceGetUtilizationRates", _Utilization(), handle)) is not None:
                yield f"gpu{index}_percent", float(use.gpu)
            if (memory := self._value("nvmlDeviceGetMemoryInfo", _Memory(), handle)) is not None:
                yield f"gpu{index}_memory_bytes", float(memory.used)
            if (power := self._value("nvmlDeviceGetPowerUsage", ctypes.c_uint(), handle)) is not None:
                yield f"gpu{index}_power_w", power.value / 1000
            celsius = self._value("nvmlDeviceGetTemperature", ctypes.c_uint(), handle, _CORE_TEMPERATURE)
            if celsius is not None:
                yield f"gpu{index}_temperature_c", float(celsius.value)

    def _value(self, function: str, value: Any, *arguments: Any) -> Any:
        """The value that a function of the library fills in; None if it reports an error."""
        return value if getattr(self._library, function)(*arguments, ctypes.byref(value)) == 0 else None
