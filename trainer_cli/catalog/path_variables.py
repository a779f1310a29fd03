"""Variables in paths of checkpoints: `{rank}` and the like of this process, and the counts of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from trainer_cli.errors import UserError

RANK_VARIABLES = {
    "rank": ("RANK", "SLURM_PROCID"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
    "node_rank": ("GROUP_RANK", "SLURM_NODEID"),
}
"""Variables that any path may have, and the environment variables that give their values: torchrun's, Slurm's."""
_NO_COUNTS: Mapping[str, object] = MappingProxyType({})
_VARIABLE = re.compile(r"\{([A-Za-z_]\w*)(:[^{},]*)?\}", re.ASCII)


def fill_in(path: str, environment: Mapping[str, str], counts: Mapping[str, object] = _NO_COUNTS) -> str:
    """A path with its variables replaced: `{rank}`, `{local_rank}` and `{node_rank}`, and those in `counts`.

    A rank is 0 if the environment has no value for it. Other variables stay.

    Raises:
        UserError: the environment variable is not a number, or a format code does not fit.
    """

    def value_of(match: re.Match[str]) -> str:
        field, name, code = match[0], match[1], match[2] or ""
        if name in RANK_VARIABLES:
            value: object = _rank_of(name, environment, f"{field} in {path}")
        elif name in counts:
            value = counts[name]
        else:
            return field
        try:
            return format(value, code.removeprefix(":"))
        except ValueError as error:
            raise UserError(f"{field}: {error}", where=path) from None

    return _VARIABLE.sub(value_of, path)


def _rank_of(name: str, environment: Mapping[str, str], where: str) -> int:
    """The rank that the environment gives for one of `RANK_VARIABLES`; 0 if it gives none."""
    source = next((variable for variable in RANK_VARIABLES[name] if environment.get(variable)), None)
    value = "0" if source is None else environment[source]
    # isdecimal alone accepts the digits of other scripts.
    if not (value.isascii() and value.isdecimal()):
        raise UserError(f"{source} is {value!r}, which is not a number", where=where)
    return int(value)


def variables_in(path: str) -> list[str]:
    """The names of the variables in a path. Alternatives of a glob, such as `{a,b}`, are not variables."""
    return [match[1] for match in _VARIABLE.finditer(path)]


def rank_variables_in(path: str) -> list[str]:
    """Those of the variables in a path whose values differ between the ranks of a launch."""
    return [name for name in variables_in(path) if name in RANK_VARIABLES]
