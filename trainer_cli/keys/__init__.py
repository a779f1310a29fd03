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

add_lazy_names(globals())
