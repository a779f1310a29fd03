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
from trainer_cli.origin.keep import keep_project as keep_project, keep_source as keep_source
from trainer_cli.origin.kept_source import (
    DamagedSourceError as DamagedSourceError,
    KeptSource as KeptSource,
)
from trainer_cli.origin.use import (
    NOTICES as NOTICES,
    of_project as of_project,
    of_source as of_source,
    read_source_of as read_source_of,
    share_source as share_source,
    use_kept_source as use_kept_source,
    use_source_of as use_source_of,
    use_submitted as use_submitted,
)
