"""Checkpoints in files of other programs: three more formats to save in, other programs' checkpoints to load, exports.

The formats `torch_file`, `archive` and `huggingface` are parts of the add-on (`addon.py`), which `trainer_cli.format`
asks for by name. `read_foreign` reads the weights that Lightning, Composer, torch, torch.distributed.checkpoint and
Hugging Face's libraries saved, and `extract_archive` an archive of a whole checkpoint. `export`, `average` and `strip`
are actions of `train ckpt`.

Files are not trusted. A pickle may name only classes that tensors consist of, and its code runs only where the user
allows it; sizes in headers are compared with the file before memory is allocated. Exports never replace a file unless
they are asked to.

Begin with `torch_file.py` for a format, with `read.py` for other programs' files, with `export_run.py` for exports. No
other package takes a name from this one: what the core asks for is a part in `addon.py`.
"""
