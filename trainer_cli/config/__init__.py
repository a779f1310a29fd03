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

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.config.changes import Change as Change, diff as diff
    from trainer_cli.config.check import find_mistakes as find_mistakes
    from trainer_cli.config.composing import Composed as Composed, compose as compose, from_yaml as from_yaml
    from trainer_cli.config.contradictions import batches_of_step as batches_of_step, check_strategy as check_strategy
    from trainer_cli.config.overrides import (
        given_value as given_value,
        hint_on_setting as hint_on_setting,
        override_error as override_error,
        parse_override as parse_override,
        read_overrides as read_overrides,
        suggest_list as suggest_list,
    )
    from trainer_cli.config.resolvers import share_time as share_time
    from trainer_cli.config.search_path import (
        PACKAGE as PACKAGE,
        SearchPath as SearchPath,
        project_root as project_root,
        shipped_folder as shipped_folder,
    )
    from trainer_cli.config.yaml import read_values as read_values

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "changes": "Change diff",
            "check": "find_mistakes",
            "composing": "compose Composed from_yaml",
            "contradictions": "batches_of_step check_strategy",
            "overrides": "given_value hint_on_setting override_error parse_override read_overrides suggest_list",
            "resolvers": "share_time",
            "search_path": "PACKAGE project_root SearchPath shipped_folder",
            "yaml": "read_values",
        },
    )
