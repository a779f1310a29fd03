from trainer_cli.keys.config_keys import (
    DATA_KEYS as DATA_KEYS,
    OF_ONE_COMMAND as OF_ONE_COMMAND,
    OPEN as OPEN,
    SEVERAL as SEVERAL,
    WITHOUT_EFFECT as WITHOUT_EFFECT,
    ConfigKey as ConfigKey,
    KeyPath as KeyPath,
    check_data_counts as check_data_counts,
    defaults as defaults,
    kind_at as kind_at,
    list_keys as list_keys,
    sections as sections,
    text_keys as text_keys,
    unknown_key as unknown_key,
    whole_values as whole_values,
    why_refused as why_refused,
)
from trainer_cli.keys.editor_schema import json_schema as json_schema
from trainer_cli.keys.resume_rules import (
    SOURCE as SOURCE,
    matches_any as matches_any,
    why_may_change as why_may_change,
)
