"""What classes and functions take, and what is wrong with the arguments that a config or a program gives them.

The arguments of a node with `_target_` are checked before its target is called: names, number, and each value against
its annotation, as far as a YAML value can be checked by one (`trainer_cli.values`). The constructors of this package
check the same where a program calls them, so that a mistake in Python reads like one in YAML.

It never calls a target, never evaluates an annotation, and never checks the constructors of users' subclasses, whose
annotations may be wrong. Where an annotation says nothing, any value is accepted.

Begin with `calls.py`: `read_parameters` reads a signature, `find_misfits` checks a call by it, `CheckedArguments` is
the base class that does so for its subclasses here.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
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

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "argument_names": "checks_argument_names",
            "calls": "CheckedArguments find_misfits names_optimizer OPTIMIZER Parameter read_parameters",
            "instances": "check_type make_instance",
            "section_arguments": "build_section takes_fields_of",
        },
    )
