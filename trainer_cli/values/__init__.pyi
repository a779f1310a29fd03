from trainer_cli.values.fields import (
    at_least as at_least,
    check_at_least as check_at_least,
    check_choice as check_choice,
    check_duration as check_duration,
    check_fields as check_fields,
    check_values as check_values,
    check_whole as check_whole,
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
    unfit_value as unfit_value,
)
