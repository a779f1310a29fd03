from trainer_cli.loads.left_out import (
    LEAVE_OUT as LEAVE_OUT,
    OPTIONAL_STATES as OPTIONAL_STATES,
    can_resume as can_resume,
    check_leave_out as check_leave_out,
    check_load as check_load,
    describe_left_out as describe_left_out,
    find_left_out as find_left_out,
    omit_states as omit_states,
)
from trainer_cli.loads.options import (
    LOG_MARKS as LOG_MARKS,
    LORA_SCALING as LORA_SCALING,
    STATES as STATES,
    VERSIONS as VERSIONS,
    WEIGHTS as WEIGHTS,
    WHOLE as WHOLE,
    LoadOptions as LoadOptions,
    check_mapping as check_mapping,
    check_states as check_states,
)
from trainer_cli.loads.report import (
    OTHER_MODEL as OTHER_MODEL,
    LoadReport as LoadReport,
    list_by_owner as list_by_owner,
)
