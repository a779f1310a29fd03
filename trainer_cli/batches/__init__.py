"""Batches: any containers of tensors, and how many samples they hold.

A batch is a tensor, or a mapping, list, tuple, dataclass or object with a method `to` that holds some, at any depth.
Nothing else is asked of it. It counts as many samples as its loader says, else as the leading size of its first tensor;
a batch whose shape contradicts that is named once (`SampleCheck`).

All functions are pure, and keep the type of containers. Only those that look at values make the host wait for a device
(`rows_with_nan`). Nothing here knows of models or trainers.

Begin with `contents.py`.
"""

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.batches.contents import (
        describe_batch as describe_batch,
        is_dense as is_dense,
        leading_size as leading_size,
        tensors_of as tensors_of,
        to_device as to_device,
    )
    from trainer_cli.batches.nan_rows import rows_with_nan as rows_with_nan
    from trainer_cli.batches.samples import SampleCheck as SampleCheck, sample_count as sample_count
    from trainer_cli.batches.split import split_batch as split_batch

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "contents": "describe_batch is_dense leading_size tensors_of to_device",
            "nan_rows": "rows_with_nan",
            "samples": "sample_count SampleCheck",
            "split": "split_batch",
        },
    )
