"""Tensors as bytes of a file of safetensors, and files whose digest is verified while they are read.

Tensors are written from their memory and read into it, without a copy in between and without holes: after a header that
is padded to 4,096 bytes each begins at a multiple of its element size (`LINE`, where possible). The layout of a file is
known before any tensor is copied.

- A `VerifiedFile` is read once, front to back, and digested on the way. What was read must not be used before its exit,
  which reads the rest and compares the digest with the manifest's: a damaged file is a `DamagedCheckpoint` that names
  it, never a wrong value.
- A header is not trusted: `read_entries` refuses shapes and offsets that do not fill the file exactly, before memory is
  allocated for them.
- `LiveTensors` are filled by a second reading of the same file, after everything was verified and compared, so nothing
  of a live state is touched if the checkpoint does not fit.

States, and which files a checkpoint has, are not known here: see `trainer_cli.format`. Begin with `header.py`, then
`verified_file.py`; `elements.py` has the types and the memory of tensors.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.tensor_files.elements import (
        DTYPES as DTYPES,
        TORCH_DTYPES as TORCH_DTYPES,
        Leaf as Leaf,
        bytes_of as bytes_of,
        check_booleans as check_booleans,
        memory_key as memory_key,
        memory_of as memory_of,
        new_tensor as new_tensor,
    )
    from trainer_cli.tensor_files.header import (
        ELEMENT_BYTES as ELEMENT_BYTES,
        LINE as LINE,
        TensorEntry as TensorEntry,
        read_entries as read_entries,
        render_header as render_header,
    )
    from trainer_cli.tensor_files.live_tensors import LiveTensors as LiveTensors, TensorName as TensorName
    from trainer_cli.tensor_files.reading import read_tensors as read_tensors
    from trainer_cli.tensor_files.verified_file import (
        Destination as Destination,
        VerifiedFile as VerifiedFile,
        read_verified as read_verified,
        verify as verify,
    )

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "elements": "bytes_of check_booleans DTYPES Leaf memory_key memory_of new_tensor TORCH_DTYPES",
            "header": "ELEMENT_BYTES LINE read_entries render_header TensorEntry",
            "live_tensors": "LiveTensors TensorName",
            "reading": "read_tensors",
            "verified_file": "Destination read_verified VerifiedFile verify",
        },
    )
