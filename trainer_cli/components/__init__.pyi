from trainer_cli.components.bind import check_components as check_components
from trainer_cli.components.nodes import (
    EVALUATED as EVALUATED,
    SAVER as SAVER,
    SCHEDULER_KEYS as SCHEDULER_KEYS,
    SECTIONS as SECTIONS,
    SPECIAL as SPECIAL,
    as_node as as_node,
    check_keys as check_keys,
    fill_from_data as fill_from_data,
    is_node as is_node,
    list_metric_intervals as list_metric_intervals,
    list_optimizers as list_optimizers,
    list_schedules as list_schedules,
    needs_data as needs_data,
)
from trainer_cli.components.shadows import refuse_shadows as refuse_shadows
from trainer_cli.components.targets import (
    Trust as Trust,
    import_from as import_from,
    import_target as import_target,
)
