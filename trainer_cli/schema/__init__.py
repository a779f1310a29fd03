"""The sections of the config as dataclasses: every key, with its type, default, meaning and the rules of its value.

`TrainConfig` is the whole config. The docstring under a field is its documentation everywhere: in `train config`, in
the JSON Schema and on the site. A section checks and converts its values when it is made, from YAML or in Python, and
raises a `ConfigError` with the key path; a section that exists is therefore valid.

A section is never null; a part of it is off when its key field is null. Nothing is composed or interpolated here
(`trainer_cli.config`), and no section knows what is built from it. Modules of this package do not import annotations
from `__future__`: the types of fields are read at run time.

Begin with `sections.py`, in the order of the YAML; `checkpoint_config.py` is the section `checkpoint`.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.schema.checkpoint_config import (
        CheckpointConfig as CheckpointConfig,
        CheckpointFormat as CheckpointFormat,
        Compression as Compression,
        DigestAlgorithm as DigestAlgorithm,
        KeepBestConfig as KeepBestConfig,
        Newer as Newer,
        Removal as Removal,
    )
    from trainer_cli.schema.sections import (
        ANEW as ANEW,
        RESUME_WORDS as RESUME_WORDS,
        SYSTEM as SYSTEM,
        Dtype as Dtype,
        LoadConfig as LoadConfig,
        LoggingConfig as LoggingConfig,
        LoopConfig as LoopConfig,
        ModelCall as ModelCall,
        ParallelConfig as ParallelConfig,
        ParallelStrategy as ParallelStrategy,
        PrecisionConfig as PrecisionConfig,
        SchedulerInterval as SchedulerInterval,
        TrainConfig as TrainConfig,
    )

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "checkpoint_config": (
                "CheckpointConfig CheckpointFormat Compression DigestAlgorithm KeepBestConfig Newer Removal"
            ),
            "sections": (
                "ANEW Dtype LoadConfig LoggingConfig LoopConfig ModelCall ParallelConfig ParallelStrategy "
                "PrecisionConfig RESUME_WORDS SchedulerInterval SYSTEM TrainConfig"
            ),
        },
    )
