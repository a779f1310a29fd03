"""The command `train` and its library. Public names are imported when first used, so this module loads no torch."""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals(), of_addons=True)
