"""The sections of the config as dataclasses: every key, with its type, default, meaning and the rules of its value.

`TrainConfig` is the whole config. The docstring under a field is its documentation everywhere: in `train config`, in
the JSON Schema and on the site. A section checks and converts its values when it is made, from YAML or in Python, and
raises a `ConfigError` with the key path; a section that exists is therefore valid.

A section is never null; a part of it is off when its key field is null. Nothing is composed or interpolated here
(`trainer_cli.config`), and no section knows what is built from it. Modules of this package do not import annotations
from `__future__`: the types of fields are read at run time.

Begin with `sections.py`, in the order of the YAML; `checkpoint_config.py` is the section `checkpoint`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
