"""Checkpoints in files of other programs: three more formats to save in, other programs' checkpoints to load, exports.

The formats `torch_file`, `archive` and `huggingface` are parts of the add-on (`addon.py`), which `trainer_cli.format`
asks for by name. `read_foreign` reads the weights that Lightning, Composer, torch, torch.distributed.checkpoint and
Hugging Face's libraries saved. `export_weights`, `average_weights` and `strip_weights` are actions of `train ckpt`, and
`evaluated_weights` the weights that evaluations of a run used.

Files are not trusted. A pickle may name only classes that tensors consist of, and its code runs only where the user
allows it; sizes in headers are compared with the file before memory is allocated. Exports never replace a file unless
they are asked to.

Begin with `torch_file.py` for a format, with `read.py` for other programs' files, with `export_run.py` for exports.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.addons.formats.archive_file import SUFFIX as SUFFIX
    from trainer_cli.addons.formats.archive_file import ArchiveWriter as ArchiveWriter
    from trainer_cli.addons.formats.archive_file import Member as Member
    from trainer_cli.addons.formats.archive_file import read_archive as read_archive
    from trainer_cli.addons.formats.ckpt_export import EXPORT_FLAGS as EXPORT_FLAGS
    from trainer_cli.addons.formats.ckpt_export import average_weights as average_weights
    from trainer_cli.addons.formats.ckpt_export import export_weights as export_weights
    from trainer_cli.addons.formats.ckpt_export import strip_weights as strip_weights
    from trainer_cli.addons.formats.export_run import evaluated_weights as evaluated_weights
    from trainer_cli.addons.formats.read import read_foreign as read_foreign
    from trainer_cli.addons.formats.torch_checkpointer import file_of_rank as file_of_rank
    from trainer_cli.addons.formats.torch_checkpointer import read_rank as read_rank

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "archive_file": "ArchiveWriter Member read_archive SUFFIX",
            "ckpt_export": "average_weights EXPORT_FLAGS export_weights strip_weights",
            "export_run": "evaluated_weights",
            "read": "read_foreign",
            "torch_checkpointer": "file_of_rank read_rank",
        },
    )
