"""Batches: any containers of tensors, and how many samples they hold.

A batch is a tensor, or a mapping, list, tuple, dataclass or object with a method `to` that holds some, at any depth.
Nothing else is asked of it. It counts as many samples as its loader says, else as the leading size of its first tensor;
a batch whose shape contradicts that is named once (`SampleCheck`).

All functions are pure, and keep the type of containers. Only those that look at values make the host wait for a device
(`rows_with_nan`). Nothing here knows of models or trainers.

Begin with `contents.py`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
