from trainer_cli.signatures.argument_names import checks_argument_names as checks_argument_names
from trainer_cli.signatures.calls import (
    OPTIMIZER as OPTIMIZER,
    CheckedArguments as CheckedArguments,
    Parameter as Parameter,
    find_misfits as find_misfits,
    names_optimizer as names_optimizer,
    read_parameters as read_parameters,
)
from trainer_cli.signatures.instances import check_type as check_type, make_instance as make_instance
from trainer_cli.signatures.section_arguments import (
    build_section as build_section,
    takes_fields_of as takes_fields_of,
)
