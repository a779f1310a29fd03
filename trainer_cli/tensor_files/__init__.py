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

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
