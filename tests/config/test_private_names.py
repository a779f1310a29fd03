"""Private names of Hydra and OmegaConf stay in two modules, and each is still needed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hydra.core.override_parser.types
import hydra.plugins.config_source
import omegaconf

import trainer_cli
from trainer_cli.config import hydra_compat

PACKAGE = Path(trainer_cli.__file__).parent
OWNERS = (omegaconf.DictConfig, omegaconf.ListConfig, omegaconf.OmegaConf, omegaconf.AnyNode, omegaconf.StringNode,
          hydra.core.override_parser.types.Override, hydra.plugins.config_source.ConfigSource)  # fmt: skip
PRIVATE = {name for owner in OWNERS for name in (*dir(owner), *getattr(owner, "__annotations__", ()))}
PRIVATE = {name for name in PRIVATE if name.startswith("_") and not name.startswith("__")}
ALLOWED = {
    "hydra._internal.config_repository.ConfigRepository",
    "hydra._internal.defaults_list.create_defaults_list",
    "omegaconf._utils.get_yaml_loader",
    "BaseContainer._resolvers",
    "override._value",
}
OF_TARGETS = {
    "hydra._internal.target_policy._authorize_target_name",
    "hydra._internal.target_policy._get_resolved_target_name_for_check",
}


def private_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("hydra", "omegaconf"):
            for alias in node.names:
                if "._" in (name := f"{node.module}.{alias.name}"):
                    yield name
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.startswith(("hydra._", "omegaconf._")))
        elif (
            isinstance(node, ast.Attribute) and node.attr in PRIVATE and ast.unparse(node.value) not in ("self", "cls")
        ):
            yield ast.unparse(node)


def test_private_names_of_hydra_and_omegaconf_are_used_in_two_modules_only() -> None:
    assert "_value" in PRIVATE
    found = {path.relative_to(PACKAGE).as_posix(): set(private_names(path)) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {
        "config/hydra_compat.py": ALLOWED,
        "components/targets.py": OF_TARGETS,
    }


def test_each_is_named_with_its_reason() -> None:
    for name in ALLOWED:
        assert name.rpartition(".")[2] in (hydra_compat.__doc__ or ""), name
