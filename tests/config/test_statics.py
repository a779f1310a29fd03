"""Targets looked up in files: what is there, what is not, and what nobody can tell without running it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_cli.config.parameters import live_parameters
from trainer_cli.config.statics import Absent, Broken, Found, Statics, Unknown

FILES = {
    "mine/__init__.py": (
        "from mine.nets import Net as Renamed, make\nfrom .nets import Inner\nimport mine.sub.deep as deep\n"
        "from mine.stars import *\nfrom mine.closed import *\nfrom .Twin import Twin\nfrom math import sqrt as root\n"
        "Alias = Renamed\nNUMBER = 3\nfresh = lambda width, depth=2: None\n"
    ),
    "mine/nets.py": (
        "import torch_is_not_here\n"
        "from typing import Optional\n"
        "class Net:\n"
        "    def __init__(self, width: int, depth: Optional[int] = None, *, name: str = 'a', **rest): ...\n"
        "    @classmethod\n    def from_x(cls, x: float): ...\n"
        "    @staticmethod\n    def plain(y): ...\n"
        "    @property\n    def size(self): ...\n"
        "    class Part:\n        def __init__(self, only): ...\n"
        "    made = from_x\n"
        "class Inner(Net): ...\n"
        "class Outer(Inner):\n    def __new__(cls, a, b=1): ...\n"
        "def make(): ...\n"
    ),
    "mine/sub/__init__.py": "",
    "mine/sub/deep.py": "class Deep: ...\nfrom ..nets import make as up\nfrom . import other\n",
    "mine/sub/other.py": "def here(one, /, two, *three, four): ...\n",
    "mine/stars.py": "def shiny(): ...\ndef _dull(): ...\n",
    "mine/closed.py": "__all__ = ['listed']\ndef listed(): ...\ndef unlisted(): ...\n",
    "mine/Twin.py": "class Twin:\n    @classmethod\n    def of(cls): ...\n",
    "mine/ways.py": (
        "from typing import TYPE_CHECKING\n"
        "try:\n    from not_there_at_all import Fast as Best\n"
        "except ImportError:\n    from mine.nets import Net as Best\n"
        "try:\n    from mine.nets import Net as Maybe\nexcept ImportError:\n    Maybe = None\n"
        "if TYPE_CHECKING:\n    from mine.nets import Outer as OnlyTyped\n"
        "import sys\n"
        "if sys.platform == 'x':\n    def either(a): ...\nelse:\n    def either(b): ...\n"
        "def twice(a): ...\ndef twice(b): ...\n"
        "import contextlib\n"
        "@contextlib.unheard_of\ndef odd(a): ...\n"
        "@contextlib.unheard_of\nclass Odd:\n    def __init__(self, a): ...\n"
        "class Meta(type): ...\nclass Made(metaclass=Meta): ...\n"
        "made = make_it()\nconst, other = 1, 2\n"
        "class Based(contextlib.Unheard): ...\nclass Self(Based):\n    def __init__(self, a): ...\n"
    ),
    "mine/late.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mine.nets import Net\n"
        "def __getattr__(name): ...\n"
    ),
    "mine/data.py": (
        "from dataclasses import dataclass, field, KW_ONLY\nimport dataclasses as d\nfrom typing import ClassVar\n"
        "@dataclass\nclass Base:\n    a: int\n    b: float = 1.0\n    kind: ClassVar[str] = 'x'\n"
        "@dataclass(kw_only=True, slots=True)\nclass Child(Base):\n    c: str\n"
        "    d: list[int] = field(default_factory=list)\n"
        "    hidden: int = field(init=False, default=0)\n"
        "@dataclass\nclass Mixed:\n    a: int\n    _: KW_ONLY\n    b: int = 1\n"
        "class Plain(Base): ...\n"
        "@dataclass\nclass Own:\n    a: int\n    def __init__(self, z): ...\n"
    ),
    "mine/diamond.py": (
        "class Top:\n    def __init__(self, top): ...\nclass Left(Top): ...\n"
        "class Right(Top):\n    def __init__(self, right): ...\nclass Both(Left, Right): ...\n"
    ),
    "mine/circle.py": "from mine.round import A\n",
    "mine/round.py": "from mine.circle import A\n",
    "mine/broken.py": "x = 1\nclass Net(:\n",
    "mine/typed.py": (
        "def one(a: 'int', b: int | None, c: list[int] | float, d: 'Unheard | int', e,\n"
        "        f: str = None, g: int = 'x'): ...\n"
    ),
    "space/net.py": "class Net: ...\n",
    "src/inner_src/__init__.py": "class Net: ...\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def statics(root: Path) -> Statics:
    return Statics([root])


def names(found: object) -> list[str] | None:
    """The parameters' names, `*` before those that may be left out."""
    assert isinstance(found, Found), found
    if found.parameters is None:
        return None
    return [one.name if one.required else f"*{one.name}" for one in found.parameters]


@pytest.mark.parametrize(
    ("path", "kind", "parameters"),
    [
        ("mine.nets.Net", "class", ["width", "*depth", "*name", "*rest"]),
        ("mine.Renamed", "class", ["width", "*depth", "*name", "*rest"]),
        ("mine.Alias", "class", ["width", "*depth", "*name", "*rest"]),
        ("mine.Inner", "class", ["width", "*depth", "*name", "*rest"]),
        ("mine.nets.Outer", "class", ["a", "*b"]),
        ("mine.nets.Net.from_x", "function", ["x"]),
        ("mine.nets.Inner.from_x", "function", ["x"]),
        ("mine.nets.Net.made", "function", ["x"]),
        ("mine.nets.Net.plain", "function", ["y"]),
        ("mine.nets.Net.Part", "class", ["only"]),
        ("mine.make", "function", []),
        ("mine.fresh", "function", ["width", "*depth"]),
        ("mine.deep.Deep", "class", []),
        ("mine.sub.deep.up", "function", []),
        ("mine.sub.deep.other.here", "function", ["one", "two", "*three", "four"]),
        ("mine.shiny", "function", []),
        ("mine.listed", "function", []),
        ("mine.Twin", "class", []),
        ("mine.Twin.of", "function", []),
        ("mine.ways.Best", "class", ["width", "*depth", "*name", "*rest"]),
        ("mine.ways.Maybe", "class", ["width", "*depth", "*name", "*rest"]),
        ("mine.ways.twice", "function", ["b"]),
        ("mine.ways.Odd", "class", None),
        ("mine.ways.Made", "class", None),
        ("mine.ways.Based", "class", None),
        ("mine.ways.Self", "class", ["a"]),
        ("mine.late.Net", "class", ["width", "*depth", "*name", "*rest"]),
        ("mine.data.Base", "class", ["a", "*b"]),
        ("mine.data.Child", "class", ["a", "*b", "c", "*d"]),
        ("mine.data.Mixed", "class", ["a", "*b"]),
        ("mine.data.Plain", "class", ["a", "*b"]),
        ("mine.data.Own", "class", ["z"]),
        ("mine.diamond.Both", "class", ["right"]),
        ("mine.nets", "module", None),
        ("mine.sub", "module", None),
        ("mine.NUMBER", "value", None),
        ("space.net.Net", "class", []),
    ],
)
def test_what_is_there_is_found_with_what_it_takes(
    statics: Statics, path: str, kind: str, parameters: list[str] | None
) -> None:
    found = statics.look_up(path)
    assert isinstance(found, Found), found
    assert found.kind == kind
    assert names(found) == parameters


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("minne.nets.Net", "there is no package 'minne'"),
        ("mine.nest.Net", "package mine has no 'nest'"),
        ("mine.nets.Nett", "module mine.nets has no 'Nett'"),
        ("mine.nets.Net.form_x", "mine.nets.Net has no 'form_x'"),
        ("mine.nets.Inner.form_x", "mine.nets.Inner has no 'form_x'"),
        ("mine._dull", "package mine has no '_dull'"),
        ("mine.unlisted", "package mine has no 'unlisted'"),
        ("mine.ways.OnlyTyped", "module mine.ways has no 'OnlyTyped'"),
        ("space.net.Nett", "module space.net has no 'Nett'"),
        ("inner_src.Net", "there is no package 'inner_src'"),
    ],
)
def test_what_is_not_there_is_told_and_what_is(statics: Statics, path: str, what: str) -> None:
    absent = statics.look_up(path)
    assert isinstance(absent, Absent), absent
    assert absent.what == what


def test_the_names_that_are_there_are_told(statics: Statics) -> None:
    absent = statics.look_up("mine.nets.Nett")
    assert isinstance(absent, Absent)
    assert {"Net", "Inner", "make"} <= set(absent.names)
    assert "torch_is_not_here" not in absent.names, "an import is hardly what was meant"
    absent = statics.look_up("mine.nest.Net")
    assert isinstance(absent, Absent)
    assert {"nets", "sub", "Renamed"} <= set(absent.names)


@pytest.mark.parametrize(
    "path",
    [
        "math.sqrt",  # compiled
        "mine.root",
        "mine.ways.either",  # two ways
        "mine.ways.odd",  # an unknown decorator
        "mine.ways.made",  # computed
        "mine.ways.const",
        "mine.ways.Based.thing",  # an unknown base
        "mine.ways.Made.thing",  # a metaclass
        "mine.nets.Net.size",  # a property
        "mine.nets.Net.mro",
        "mine.late.Other",  # a module's __getattr__
        "mine.circle.A",
        "space.other.Net",  # a namespace package may have parts elsewhere
        "typing.Optional",
    ],
)
def test_what_cannot_be_told_is_no_mistake(statics: Statics, path: str) -> None:
    assert isinstance(statics.look_up(path), Unknown)


def test_a_syntax_error_is_told_with_file_and_line(statics: Statics, root: Path) -> None:
    assert statics.look_up("mine.broken.Net") == Broken("invalid syntax", str(root / "mine/broken.py"), 2)


def test_the_plain_types_of_annotations_are_read(statics: Statics) -> None:
    found = statics.look_up("mine.typed.one")
    assert isinstance(found, Found)
    assert {one.name: str(one.plain) for one in found.parameters or ()} == {
        "a": "a whole number",
        "b": "a whole number or null",
        "c": "a number or a list",
        "d": "None",
        "e": "None",
        "f": "a text or null",
        "g": "None",
    }


def test_a_root_stands_before_what_is_installed(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("class Net: ...\n")
    assert isinstance(Statics([tmp_path]).look_up("colorsys.Net"), Found)
    assert isinstance(Statics([]).look_up("colorsys.Net"), Absent)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "mine_changing.py"
    file.write_text("class Net: ...\n")
    assert names(Statics([tmp_path]).look_up("mine_changing.Net")) == []
    file.write_text("class Net:\n    def __init__(self, width): ...\n")
    assert names(Statics([tmp_path]).look_up("mine_changing.Net")) == ["width"]


def test_nothing_of_what_is_looked_up_is_imported(statics: Statics, root: Path) -> None:
    before = set(sys.modules)
    for path in ("mine.nets.Net", "mine.sub.deep.Deep", "mine.nope"):
        statics.look_up(path)
    assert set(sys.modules) - before == set()


def _public() -> Iterator[str]:
    yield from (f"torch.optim.{name}" for name in _classes("torch.optim"))
    yield from (f"torch.optim.lr_scheduler.{name}" for name in _classes("torch.optim.lr_scheduler"))
    yield from (f"torch.nn.{name}" for name in _classes("torch.nn"))
    for module in ("models.mlp", "models.cnn", "models.gpt", "data.digits", "data.text", "loggers.console",
                   "loggers.jsonl", "loggers.tensorboard", "callbacks.checkpointer", "trainer.schedulers"):  # fmt: skip
        name = f"trainer_cli.{module}"
        yield from (f"{name}.{own}" for own in _classes(name) if _live(f"{name}.{own}").__module__ == name)


def _classes(module: str) -> list[str]:
    loaded = importlib.import_module(module)
    return [name for name, value in vars(loaded).items() if inspect.isclass(value) and not name.startswith("_")]


def _live(path: str) -> type:
    module, _, name = path.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


def test_optimizers_schedulers_modules_and_our_components_take_what_they_take_alive() -> None:
    statics = Statics([])
    paths = list(_public())
    wrong: list[tuple[str, object]] = []
    told = 0
    for path in paths:
        found, alive = statics.look_up(path), live_parameters(_live(path))
        if isinstance(found, Absent | Broken):
            wrong.append((path, found))
        if not isinstance(found, Found) or found.parameters is None or alive is None:
            continue
        told += 1
        ours = [(one.name, one.kind, one.required) for one in found.parameters]
        if ours != [(one.name, one.kind, one.required) for one in alive]:
            wrong.append((path, found))
        wrong += [
            (path, f"{one.name}: {one.plain}, alive {other.plain}")
            for one, other in zip(found.parameters, alive, strict=False)
            if one.plain is not None and one.plain != other.plain
        ]
    assert not wrong
    assert told > 0.9 * len(paths) > 180, "hardly any is left untold"
