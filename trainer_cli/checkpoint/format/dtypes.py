"""The types of elements that a tensor file can hold, by their names in safetensors."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
