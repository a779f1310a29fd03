"""With which samples and source files a checkpoint was trained, compared with those of this process.

A checkpoint's manifest holds digests of a few samples of each dataset and of the project's files that were imported;
`DataAndSource` has those of this process.

It promises:
- Different samples are refused like a changed `data`, unless the config explains them or `resume_allow` allows them.
  Samples that differ from draw to draw, as of random augmentation, are left out.
- Different source files are reported by name. They are refused only where `train validate` would take the model from
  another project than the run's.
- Ranks with other data or files than rank 0 are refused before a run directory is made.

It reads samples and files, and writes nothing.

Begin with `compare.py`.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.origin.compare import (
        TRAIN as TRAIN,
        DataAndSource as DataAndSource,
        EvaluatedOrigin as EvaluatedOrigin,
        compare_forked as compare_forked,
        compare_resumed as compare_resumed,
        naming_project as naming_project,
        other_source as other_source,
        report_source as report_source,
    )

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "compare": (
                "compare_forked compare_resumed DataAndSource EvaluatedOrigin naming_project other_source "
                "report_source TRAIN"
            ),
        },
    )
