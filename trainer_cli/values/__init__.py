"""What the plain value of a config key may be: by its annotation, and by the rules that its field declares.

A `ValueKind` is what an annotation admits; `kind_of` reads it from an object or from its text. A field of a section is
declared with `at_least`, `duration`, `checked` and `needs`; `check_fields` converts the values of a whole section and
checks them by these rules, in Python as in YAML.

Every mistake is a `ConfigError` with the key path, and with a hint where a value was probably meant. A value that is
not plain, such as a tensor or a node that makes an object, is accepted: only its target can check it. Nothing here
reads a file or imports what an annotation names.

Begin with `fields.py`; `kinds.py` reads annotations.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
