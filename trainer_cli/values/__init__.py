"""What the plain value of a config key may be: by its annotation, and by the rules that its field declares.

A `ValueKind` is what an annotation admits; `kind_of` reads it from an object or from its text. A field of a section is
declared with `at_least`, `duration`, `checked` and `needs`; `check_fields` converts the values of a whole section and
checks them by these rules, in Python as in YAML.

Every mistake is a `ConfigError` with the key path, and with a hint where a value was probably meant. A value that is
not plain, such as a tensor or a node that makes an object, is accepted: only its target can check it. Nothing here
reads a file or imports what an annotation names.

Begin with `fields.py`; `kinds.py` reads annotations.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.values.fields import (
        at_least as at_least,
        check_at_least as check_at_least,
        check_duration as check_duration,
        check_fields as check_fields,
        check_rules as check_rules,
        check_values as check_values,
        checked as checked,
        duration as duration,
        needs as needs,
    )
    from trainer_cli.values.kinds import (
        IN_QUOTES as IN_QUOTES,
        MISSING as MISSING,
        SECTION as SECTION,
        ValueKind as ValueKind,
        kind_of as kind_of,
        name_of as name_of,
        show_value as show_value,
        to_yaml_line as to_yaml_line,
    )

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "fields": (
                "at_least check_at_least check_duration check_fields check_rules check_values checked duration needs"
            ),
            "kinds": "IN_QUOTES kind_of MISSING name_of SECTION show_value to_yaml_line ValueKind",
        },
    )
