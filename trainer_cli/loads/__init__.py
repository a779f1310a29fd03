"""Which states of a training a checkpoint holds, and which of them are loaded, under which names.

`STATES` are the states that `load.states` and `checkpoint.leave_out` name, with the keys of a checkpoint that hold
each. `LoadOptions` says what of a checkpoint is taken, `LoadReport` what was: which tensors were missing, unexpected,
ignored or of another shape, and what a user can do about it. `omit_states` takes states away before a save.

Everything is decided from names; nothing here reads a checkpoint or knows torch. A state that a checkpoint lacks is
never loaded as if it were there: `check_load` refuses, and names the states that can be loaded. `model` and `progress`
are in every checkpoint.

Begin with `options.py`.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
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

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "left_out": (
                "can_resume check_leave_out check_load describe_left_out find_left_out LEAVE_OUT omit_states "
                "OPTIONAL_STATES"
            ),
            "options": "check_mapping check_states LoadOptions LOG_MARKS LORA_SCALING STATES VERSIONS WEIGHTS WHOLE",
            "report": "list_by_owner LoadReport OTHER_MODEL",
        },
    )
