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
