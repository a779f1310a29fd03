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
from trainer_cli.origin.keep import keep_source as keep_source
from trainer_cli.origin.kept_source import (
    DamagedSourceError as DamagedSourceError,
    KeptSource as KeptSource,
    SourceFacts as SourceFacts,
)
