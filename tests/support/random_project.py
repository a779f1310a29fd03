"""Random groups of configs, and random command lines over them: each seed makes the same ones again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

KEYS = ("a", "b", "c", "d")
GROUPS = ("model", "data", "optimizer", "scheduler", "callbacks", "parts", "model/part")
OPTIONS = ("one", "two", "three")
COMPONENTS = ("model", "data", "optimizer", "scheduler")
_TARGETS = ("mine.A", "mine.B")


class RandomProject:
    """The files of a project, and the groups that its primary config chooses, as `group` or `group@package`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.files: dict[str, str] = {}
        self.chosen: list[str] = []
        self.written_out: dict[str, list[str]] = {}
        """Experiment -> the components that it writes out, and of which it chooses no option."""
        for group in GROUPS:
            for option in OPTIONS:
                self.files[f"{group}/{option}.yaml"] = self._option(group)
        for name in ("first", "second"):
            self.files[f"experiment/{name}.yaml"] = self._experiment(name)
        # Merged last, it sets a component to null: what `~GROUP` of a component means.
        for group in COMPONENTS:
            self.files[f"off/{group}.yaml"] = f"# @package _global_\n{group}: null\n"
        self.files["config.yaml"] = self._primary()

    def write(self, folder: Path) -> None:
        """Write the files into a folder of configs."""
        for name, text in self.files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def command_line(self) -> list[str]:
        """A few overrides of groups and of values."""
        pick = self._random
        lines = [self._choice() for _ in range(pick.randrange(3))]
        lines += [self._value_override() for _ in range(pick.randrange(4))]
        if pick.random() < 0.6:
            lines.append("+experiment=" + pick.choice(("first", "second", "[first,second]", "[second,first]")))
        pick.shuffle(lines)
        return lines

    def _option(self, group: str) -> str:
        pick = self._random
        headers = ("_global_", f"{group.replace('/', '.')}.inner", "callbacks.c")
        header = f"# @package {pick.choice(headers)}\n" if pick.random() < 0.15 else ""
        values = self._mapping(2)
        defaults: list[Any] = []
        if group == "model" and pick.random() < 0.5:
            key = pick.choice(("part", "part@left", "/model/part@_global_.data.b", "/parts@_here_", "/parts@x.y"))
            defaults = [{key: pick.choice(OPTIONS)}, "_self_"]
        elif group != "parts" and pick.random() < 0.1:
            defaults = [{"/parts@b": [*pick.sample(OPTIONS, 2)]}]
        pick.shuffle(defaults)
        if group in COMPONENTS and pick.random() < 0.7:
            values["_target_"] = pick.choice(_TARGETS)
        return header + _yaml({**({"defaults": defaults} if defaults else {}), **values})

    def _experiment(self, name: str) -> str:
        pick = self._random
        values = {group: self._mapping(2) for group in (*COMPONENTS, "callbacks", "parts") if pick.random() < 0.4}
        defaults: list[Any] = []
        overridden = [group for group in COMPONENTS if pick.random() < 0.25]
        if pick.random() < 0.3:
            defaults.append({"/parts@callbacks.d": pick.choice(OPTIONS)})
        if defaults and pick.random() < 0.5:
            defaults.insert(pick.randrange(2), "_self_")
        defaults += [{f"override /{group}": pick.choice(OPTIONS)} for group in overridden]
        written = []
        for group in COMPONENTS:
            if group in values and pick.random() < 0.5:
                values[group]["_target_"] = pick.choice(_TARGETS)
                written += [group] if group not in overridden else []
        self.written_out[name] = written
        return "# @package _global_\n" + _yaml({**({"defaults": defaults} if defaults else {}), **values, "seed": 1})

    def _primary(self) -> str:
        pick = self._random
        self.chosen = [group for group in GROUPS[:-1] if pick.random() < 0.8]
        self.chosen += [f"parts@{place}" for place in ("data.p", "callbacks.e", "q") if pick.random() < 0.4]
        defaults: list[Any] = [{group: pick.choice((*OPTIONS, None))} for group in self.chosen]
        pick.shuffle(defaults)
        if pick.random() < 0.9:
            defaults.insert(pick.randrange(len(defaults) + 1), "_self_")
        values = {key: self._mapping(1) for key in (*COMPONENTS, "parts") if pick.random() < 0.2}
        return _yaml({"defaults": defaults, **values, "seed": 0, "none": None, "empty": {}, "list": [1, 2]})

    def _mapping(self, depth: int) -> dict[str, Any]:
        return {key: self._value(depth) for key in KEYS if self._random.random() < 0.5}

    def _value(self, depth: int) -> Any:
        pick = self._random
        kind = pick.random()
        if depth and kind < 0.3:
            return self._mapping(depth - 1)
        if kind < 0.4:
            return [pick.randrange(9) for _ in range(pick.randrange(3))]
        if kind < 0.47:
            return f"${{{pick.choice(GROUPS[:6])}.{pick.choice(KEYS)}}}"
        return pick.choice((None, "???", "text", True, pick.randrange(9), pick.random()))

    def _choice(self) -> str:
        pick = self._random
        group = pick.choice(self.chosen) if self.chosen and pick.random() < 0.7 else pick.choice(GROUPS)
        kind = pick.random()
        if group not in self.chosen:
            return f"+{group}={pick.choice(OPTIONS)}"
        if kind < 0.2:
            return f"~{group}"
        if kind < 0.4:
            place = pick.choice(("callbacks.two", "data.b", "model.left", "new.place", "_global_"))
            return f"+{group.partition('@')[0]}@{place}={pick.choice(OPTIONS)}"
        if kind < 0.5:
            return f"{group}=[{','.join(pick.sample(OPTIONS, 2))}]"
        return f"{group}={pick.choice(OPTIONS)}"

    def _value_override(self) -> str:
        pick = self._random
        roots = ("model", "data", "optimizer", "scheduler", "callbacks", "parts", "seed", "none", "empty", "list")
        key = ".".join([pick.choice(roots), *pick.sample(KEYS, pick.randrange(3))])
        sign = pick.choice(("", "", "+", *["++"] * 8))
        if pick.random() < 0.05:
            return f"~{key}"
        value = self._value(2)
        if key in GROUPS and not isinstance(value, dict):
            value = {"a": value}  # Anything else chooses an option.
        return f"{sign}{key}={_on_the_line(value)}"


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False)


def _on_the_line(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_on_the_line(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_on_the_line, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
