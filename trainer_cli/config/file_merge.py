"""Merge the files that the primary config and the overrides of groups choose, each into its package.

Which files, in what order, and how two values merge is decided by Hydra. Two rules are added for components, both
described in docs/configuration.md:

- An experiment that writes a component out (`model: {_target_: mine.Net}`) is composed as if `~model` were given:
  config.yaml chooses a model, so that it runs by itself, and its arguments would not fit another class. It is not if
  the experiment or the command line chooses an option of that group.
- `~scheduler` and `scheduler=null` switch a component off, with what the files set in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hydra.core.override_parser.types import Override

from trainer_cli.config import hydra_compat
from trainer_cli.config.check import COMPONENTS, switches_off
from trainer_cli.config.files import ConfigFiles, is_component, read_entries
from trainer_cli.config.hydra_compat import SCHEMA, DefaultsList, Merged
from trainer_cli.config.overrides import line_of, parse_overrides
from trainer_cli.config.search_path import SearchPath
from trainer_cli.config.tree import MergeError, Node, merge as merge_nodes, name_kind
from trainer_cli.keys import defaults


def merge(search: SearchPath, choices: Sequence[Override], files: ConfigFiles) -> tuple[Node, list[Merged]]:
    """Merge the files. Returns the tree, unresolved, and the entries of the defaults list.

    A file that does not merge is left out and gets a mistake in `files`.

    Raises:
        HydraException, ValueError, RecursionError: the defaults list cannot be computed.
    """
    hydra_choices = [_for_hydra(choice) for choice in choices]
    repository = hydra_compat.repository(files)
    defaults_list = hydra_compat.defaults_list(repository, search.primary, hydra_choices)
    # Which experiments are listed is known only now, and they may remove groups: compute the list again.
    if replaced := [*_replaced_groups(search, defaults_list, choices, files)]:
        hydra_choices += parse_overrides([f"~{group}" for group in replaced]).overrides
        defaults_list = hydra_compat.defaults_list(repository, search.primary, hydra_choices)
    # Without the schema's types: the merge keeps what was written, and `validate` explains what does not fit.
    tree = Node({})
    for entry in defaults_list.merged:
        node = Node.of(defaults()) if entry.name == SCHEMA else Node({})
        file = search.find(entry.name)
        if file is not None and not files[file].broken:
            # In the root, `hydra` has settings of Hydra's own; in a package it is a key like any other.
            hidden = ("defaults",) if entry.package else ("defaults", "hydra")
            node = Node({key: child for key, child in files[file].tree.value.items() if key not in hidden})
        # The values of a file go below the keys of its package.
        for name in reversed(entry.package.split(".")) if entry.package else ():
            node = Node({name: node})
        # Interpolations stay as they are written, since later files may change what they refer to.
        try:
            merge_nodes(tree, node)
        except MergeError as error:
            new, old = error.new, error.old
            message = (
                f"{'.'.join(error.path)} is {name_kind(new.value)}, but {old.where} makes it {name_kind(old.value)}"
            )
            hint = "A list and a mapping do not merge: write both as one kind."
            if file is not None:
                files[file].add(message, new.where, hint, breaks=True)
    # After the merge, so that values of the section that a file sets go too.
    for choice in choices:
        if switches_off(choice):
            tree.value[choice.key_or_group] = Node(None)
    return tree, defaults_list.merged


def _for_hydra(choice: Override) -> Override:
    """An override of a group as Hydra takes it: `group=null` as `~group`, and option names always as strings."""
    key, value = line_of(choice).partition("=")[0], choice.value()
    if choice.is_delete():
        return choice
    if value is None:
        # Hydra would look for an option called null.
        return parse_overrides([f"~{key.lstrip('+')}"]).overrides[0]
    names = value if isinstance(value, list) else [value]
    if all(isinstance(name, str) for name in names):
        return choice
    # An option may be called 1 or true, which Hydra's grammar reads as a number or a truth value.
    texts = ",".join(f"'{name}'" for name in names)
    return parse_overrides([f"{key}=[{texts}]" if isinstance(value, list) else f"{key}={texts}"]).overrides[0]


def _replaced_groups(
    search: SearchPath, defaults_list: DefaultsList, choices: Sequence[Override], files: ConfigFiles
) -> Iterator[str]:
    """The groups whose default choice is replaced by a component that an experiment writes out."""
    experiments = [entry.name for entry in defaults_list.merged if entry.name.startswith("experiment/")]
    trees = {name: files[file].tree for name in experiments if (file := search.find(name)) is not None}
    chosen_groups = {choice.key_or_group for choice in choices if choice.package is None}
    for name, tree in trees.items():
        chosen_groups.update(entry.group for entry in read_entries(tree, name) if not entry.package)
    for group in COMPONENTS:
        nodes = [tree.value.get(group) for tree in trees.values()]
        is_written_out = any(node is not None and is_component(group, node.plain()) for node in nodes)
        has_default = defaults_list.chosen.get(group) is not None
        if is_written_out and has_default and group not in chosen_groups:
            yield group
