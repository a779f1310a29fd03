"""With which samples and source files a checkpoint was trained, compared with those of this process.

A checkpoint's manifest holds digests of a few samples of each dataset and of the project's files that were imported;
`DataAndSource` has those of this process.

It promises:
- Different samples are refused like a changed `data`, unless the config explains them or `resume_allow` allows them.
  Samples that differ from draw to draw, as of random augmentation, are left out.
- Different source files are reported by name. They are refused only where `train validate` would take the model from
  another project than the run's.
- Ranks with other data or files than rank 0 are refused before a run directory is made.
- A run keeps the source that made it (`KeptSource`), whole or not at all, before its first step. A failure is a warning
  only.
- The source of a submission (`keep_project`) is used by every process that starts later.
- A kept source is read only as it was written, and `is_own` tells that of this user from that of others.

It decides nothing about a training, and writes nothing but the kept source.

Begin with `compare.py`, and `kept_source.py` for what a run keeps.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
