"""Every key that a config may have: its type, default and meaning, and whether a resume may change it.

The keys are those of the dataclasses in `schema`. Nothing here knows files, overrides or a composed config.

- `list_keys` has every key of the closed sections in the order of the YAML; `OPEN` names the others.
- A path of keys is a tuple of strings (`KeyPath`); text joins it by dots.
- `why_may_change` gives the reason why a key may change on a resume. A key without a reason may not: the run would no
  longer be the same training.
- `json_schema` writes all of it for editors (configs/train.schema.json).

Begin with `config_keys.py`, then `resume_rules.py`.
"""

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
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

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "config_keys": (
                "check_data_counts ConfigKey DATA_KEYS defaults KeyPath kind_at list_keys OF_ONE_COMMAND OPEN "
                "sections SEVERAL text_keys unknown_key whole_values why_refused "
                "WITHOUT_EFFECT"
            ),
            "editor_schema": "json_schema",
            "resume_rules": "matches_any SOURCE why_may_change",
        },
    )
