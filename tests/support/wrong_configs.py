"""Wrong compositions as rows of a table: how each is refused, and that what the message says to write composes.

The cure of a row is what is done to the config, or, where that takes more than the message shows, words of the hint.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainer_cli.config.composing import compose
from trainer_cli.config.search_path import SearchPath
from trainer_cli.errors import Code, ConfigError

COMMAND_LINE = "command line"
OWN = "configs/experiment/own.yaml"
FILES = {
    "config.yaml": (
        "defaults:\n  - train_schema\n  - model: mlp\n  - data: digits\n  - optimizer: sgd\n  - scheduler: null\n"
        "  - _self_\nseed: 0\n"
    ),
    "model/mlp.yaml": "_target_: mine.MLP\nhidden: [64]\n",
    "model/cnn.yaml": "_target_: mine.CNN\nchannels: 8\n",
    "data/digits.yaml": "_target_: mine.Digits\nbatch_size: 32\n",
    "data/text.yaml": "_target_: mine.Text\npath: ???\n",
    "optimizer/sgd.yaml": "_target_: mine.SGD\nlr: 0.1\n",
    "experiment/small.yaml": "# @package _global_\ndefaults:\n  - override /model: cnn\nseed: 3\n",
    "parts/a.yaml": "lr: 1.0\n",
    "parts/b.yaml": "lr: 2.0\n",
    "parts/inner/a.yaml": "lr: 3.0\n",
    "parts/inner/b.yaml": "lr: 4.0\n",
    "resolvers.py": "def mul(a, b):\n    return a * b\n\n\ndef fails(x):\n    raise RuntimeError('no luck')\n",
}
_CODE = "".join(
    f"class {name}:\n    def __init__(self, **settings): ...\n"
    for name in ("MLP", "CNN", "Net", "Digits", "Text", "SGD")
)
_LEAD = re.compile(r"(?:Write|write|mean|Add|or|as in) (?=['\"+~$]|\w[\w.@/]*\+?=)|: (?=['\"])")


@dataclass
class Attempt:
    """What is typed and what stands in `configs/`, before and after the cure."""

    typed: list[str]
    files: dict[str, str]
    place: str
    hint: str
    name: str

    def edit(self, old: str, new: str) -> None:
        """Replace a text in the file, at the line that the error names, or in what is typed."""
        if self.place == COMMAND_LINE:
            assert any(old in word for word in self.typed)
            self.typed = [word.replace(old, new) for word in self.typed]
            return
        if self.place == "--config-name":
            self.name = self.name.replace(old, new)
            return
        name, _, number = self.place.removeprefix("configs/").rpartition(":")
        lines = self.files[name].splitlines(keepends=True)
        assert old in lines[int(number) - 1], f"{old!r} is not in line {number} of {name}"
        lines[int(number) - 1] = lines[int(number) - 1].replace(old, new)
        self.files[name] = "".join(lines)


Cure = Callable[[Attempt], None]


@dataclass(frozen=True)
class Wrong:
    """A wrong composition: it is refused with `code` at `place`, in words that have all of `says`."""

    typed: Sequence[str]
    code: Code
    place: str
    says: str
    cure: Cure | str
    files: dict[str, str] = field(default_factory=dict)
    name: str = "config"

    def __str__(self) -> str:
        own = self.files.get("experiment/own.yaml", "").partition("\n")[2].removeprefix("defaults:\n").strip()
        return f"{own or ''} {' '.join(word for word in self.typed if word != '+experiment=own')}".strip()[:100]


def own(entries: str, code: Code, says: str, cure: Cure | str, *, line: int = 3, **more: str) -> Wrong:
    """A wrong defaults list of an experiment. `more`: texts of further files, `__` for `/` in their names."""
    text = "# @package _global_\ndefaults:\n" + "".join(f"  - {entry}\n" for entry in entries.split(" | "))
    files = {f"{name.replace('__', '/')}.yaml": content for name, content in more.items()}
    return Wrong(["+experiment=own"], code, f"{OWN}:{line}", says, cure, {"experiment/own.yaml": text, **files})


def body(text: str, code: Code, says: str, cure: Cure | str, *, line: int = 2) -> Wrong:
    """A wrong value in an experiment; `a.b: x` stands for nested mappings."""
    *above, last = re.split(r"(?<=\w)\.(?=\w)", text.partition(":")[0])
    lines = [f"{'  ' * depth}{key}:" for depth, key in enumerate(above)]
    lines.append(f"{'  ' * len(above)}{last}:{text.partition(':')[2]}")
    content = "# @package _global_\n" + "\n".join(lines) + "\n"
    place = f"{OWN}:{line + len(above)}"
    return Wrong(["+experiment=own"], code, place, says, cure, {"experiment/own.yaml": content})


def typed(line: str, code: Code, says: str, cure: Cure | str, *more: str, **files: str) -> Wrong:
    """A wrong override, after others that are right."""
    contents = {f"{name.replace('__', '/')}.yaml": content for name, content in files.items()}
    return Wrong([*more, line], code, COMMAND_LINE, says, cure, contents)


def shown(*before: str, after: str = "", **fill: str) -> Cure:
    """The word of the shell that the hint shows, in place of the last that was typed; `before` is typed before it."""

    def cure(attempt: Attempt) -> None:
        attempt.typed[-1:] = [*before, _filled(_word(attempt.hint, after), fill)]

    return cure


def added(**fill: str) -> Cure:
    """The override that the hint shows, after all that was typed."""
    return lambda attempt: attempt.typed.append(_filled(_word(attempt.hint, ""), fill))


def line(after: str = "", **fill: str) -> Cure:
    """What the hint shows, in place of the entry of the list, or of the line, that the error names."""

    def cure(attempt: Attempt) -> None:
        name, _, number = attempt.place.removeprefix("configs/").rpartition(":")
        lines = attempt.files[name].splitlines()
        indent = re.match(r"\s*", lines[int(number) - 1])
        assert indent is not None
        lines[int(number) - 1] = indent[0] + _filled(_word(attempt.hint, after), fill)
        attempt.files[name] = "\n".join(lines) + "\n"

    return cure


def part(wrong: str, after: str = "", **fill: str) -> Cure:
    """What the hint shows, in place of `wrong` in the line, or in what was typed."""
    return lambda attempt: attempt.edit(wrong, _filled(_word(attempt.hint, after), fill))


def left_out(attempt: Attempt) -> None:
    """The line, or what was typed last, goes, as the hint says."""
    assert re.search(r"Remove|Leave|leave|Name it once|Name each|Give all", attempt.hint), attempt.hint
    if attempt.place == COMMAND_LINE:
        attempt.typed.pop()
    else:
        name, _, number = attempt.place.removeprefix("configs/").rpartition(":")
        lines = attempt.files[name].splitlines(keepends=True)
        del lines[int(number) - 1]
        attempt.files[name] = "".join(lines)


def value(old: str, new: str) -> Cure:
    """A value of the kind that the message asks for (the row's `says` holds it to that), in place of the wrong one."""
    return lambda attempt: attempt.edit(old, new)


def edited(says: str, old: str, new: str) -> Cure:
    """An edit that the hint describes in words."""

    def cure(attempt: Attempt) -> None:
        assert says in attempt.hint, attempt.hint
        attempt.edit(old, new)

    return cure


def moved_down(attempt: Attempt) -> None:
    """The entry goes to the end of its list, as the hint says."""
    assert "to the end of the list" in attempt.hint
    name, _, number = attempt.place.removeprefix("configs/").rpartition(":")
    lines = attempt.files[name].splitlines()
    lines.append(lines.pop(int(number) - 1))
    attempt.files[name] = "\n".join(lines) + "\n"


def first_line(attempt: Attempt) -> None:
    """The line goes to the top of the file, as the hint says."""
    assert "Make it the first line of the file" in attempt.hint
    name, _, number = attempt.place.removeprefix("configs/").rpartition(":")
    lines = attempt.files[name].splitlines()
    lines.insert(0, lines.pop(int(number) - 1))
    attempt.files[name] = "\n".join(lines) + "\n"


@pytest.fixture
def small_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of few configs, which is the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(_CODE)
    _write(FILES)
    return tmp_path


def check(wrong: Wrong) -> None:
    """Hold a row to what it says, in the current folder; apply the cure; and compose."""
    _write(wrong.files)
    with pytest.raises(ConfigError) as caught:
        _compose(wrong.typed, wrong.name)
    error = caught.value
    assert (error.code, error.source) == (wrong.code, wrong.place), str(error)
    assert wrong.says in str(error)
    if isinstance(wrong.cure, str):
        assert wrong.cure in (error.hint or ""), str(error)
        return
    attempt = Attempt([*wrong.typed], {**FILES, **wrong.files}, wrong.place, error.hint or "", wrong.name)
    wrong.cure(attempt)
    _write(attempt.files)
    _compose(attempt.typed, attempt.name)


def _compose(words: Sequence[str], name: str) -> None:
    """Compose what is typed, or with `-m` each job of it."""
    if "-m" not in words:
        compose(words, config_name=name).check_targets(sections=("model",))
        return
    search = SearchPath.of(None, name, None)
    arguments = [word for word in words if word != "-m"]
    sweep = pytest.importorskip("trainer_cli.addons.jobs.sweep_jobs")

    def options(group: str) -> list[str] | None:
        return list(search.options(group)) if search.is_group(group) else None

    for job in sweep.read_swept(arguments, options).list_grid():
        compose(job.overrides, config_name=name)


def _word(hint: str, after: str) -> str:
    """The first word of the shell that a hint shows, or the first after some words of it."""
    found = re.search(re.escape(after), hint) if after else _LEAD.search(hint)
    assert found is not None, f"nothing to type in: {hint}"
    lexer = shlex.shlex(hint[found.end() :].lstrip(), posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    return (lexer.get_token() or "").rstrip(".,?;")


def _filled(word: str, fill: dict[str, str]) -> str:
    for name, text in fill.items():
        assert name in word, f"{name} is not in {word}"
        word = word.replace(name, text)
    return word


def _write(files: dict[str, str]) -> None:
    for name, content in files.items():
        file = Path("configs", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
