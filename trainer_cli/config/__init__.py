"""From YAML files and overrides to a checked `TrainConfig`, each value of which knows where it was written.

`compose` merges the primary config, the options of its groups and the overrides, by Hydra's rules; `from_yaml` reads
a config that a run has stored. Both return a `Composed`: the config, its tree of values, and the targets it may name.

- Every mistake is a `ConfigError` that says what is wrong, where (file and line, or the command line) and what to do;
  independent mistakes are raised together.
- Nothing is built, no target is imported, and torch is not loaded; `Composed.check_targets` imports targets.
- Interpolations are resolved for checks and stay unresolved in what is written, so that no secret is stored.
- Composing reads files only, and sets what is global in OmegaConf: its resolvers, from `configs/resolvers.py`.

Begin with `compose.py`; then `tree.py` for values and where they are from, `files.py` and `file_merge.py` for YAML,
`overrides.py` and `override_values.py` for the command line, `check.py` for what is refused.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
