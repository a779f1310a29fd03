"""What a `_target_` may name, for a user's own config and for one found on disk."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any, cast

import pytest
from hostile_targets import ELSEWHERE, HOLES, REACHES, TARGETS, TRUST, TRUSTED, check_bounded, check_refused, words

import trainer_cli
from trainer_cli.commands.command_line import main
from trainer_cli.components import targets
from trainer_cli.components.shadows import _LIBRARIES, refuse_shadows
from trainer_cli.components.targets import Trust, import_from
from trainer_cli.config.composing import from_yaml
from trainer_cli.errors import ConfigError, ExitCode
from trainer_cli.running.build import Builder
from trainer_cli.running.reach import is_outside
from trainer_cli.schema.sections import TrainConfig
from trainer_cli.signatures.calls import CheckedArguments

OWN = Trust()
WHERE = "model._target_, configs/model/mlp.yaml:2"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a package, a module, a loose alias of `os.system`, and an environment inside it."""
    files = {
        "mine_pkg/__init__.py": "from os import system as innocent\nfrom mine_pkg.nets import Net\nVALUE = 3\n",
        "mine_pkg/nets.py": "class Net:\n    @classmethod\n    def made(cls): return cls()\ndef make(): return Net()\n",
        "mine_pkg/broken.py": "import not_there_at_all\n",
        "mine_pkg/failing.py": "raise ValueError('on import')\n",
        "mine_one.py": "class One: pass\n",
        "src/mine_src/__init__.py": "",
        ".venv/lib/other.py": "",
        "subprocess.py": "",
        "notes/readme.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("mine_"):
            del sys.modules[name]


@pytest.mark.parametrize(
    "path",
    ["mine_pkg.nets.Net", "mine_pkg.Net", "mine_pkg.nets.make", "mine_pkg.Net.made", "mine_one.One", "math.sqrt"],
)
def test_a_users_own_config_may_name_any_class_or_function(mine: Path, path: str) -> None:
    assert callable(targets.import_target(path, WHERE, OWN))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("mine_pgk.Net", f"there is no package 'mine_pgk' ({WHERE})"),
        ("mine_pkg.nest.Net", f"package mine_pkg has no 'nest' ({WHERE}). Did you mean"),
        ("mine_pkg.nets.Nett", f"module mine_pkg.nets has no 'Nett' ({WHERE}). Did you mean 'Net'?"),
        ("mine_pkg.nets.Net.maid", "has no 'maid'"),
        ("Net", "is not a dotted name"),
        ("mine_pkg..Net", "is not a dotted name"),
        ("mine_pkg.class.x", "is not a dotted name"),
        ("mine_pkg.VALUE", "is of type int, but it must be a class or a function"),
        ("mine_pkg.nets", "is a module, but"),
    ],
)
def test_a_target_that_is_not_there_or_is_no_factory_is_reported(mine: Path, path: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        targets.import_target(path, WHERE, OWN)
    assert expected in str(caught.value)
    assert "configs/model/mlp.yaml:2" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "error"), [("mine_pkg.broken.X", ModuleNotFoundError), ("mine_pkg.failing.X", ValueError)]
)
def test_an_error_inside_the_users_module_is_his_own_with_a_note(mine: Path, path: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        targets.import_target(path, WHERE, OWN)
    assert WHERE in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    "path", ["os.system", "posix.system", "shutil.rmtree", "subprocess.Popen", "builtins.eval", "mine_pkg.innocent"]
)
def test_what_runs_or_destroys_anything_is_refused_by_whatever_name(mine: Path, path: str) -> None:
    for trust in (OWN, Trust(frozenset({"os", "posix", "shutil", "subprocess", "builtins", "mine_pkg"}))):
        with pytest.raises(ConfigError, match="blocked"):
            targets.import_target(path, WHERE, trust)


@pytest.mark.parametrize(
    "path", ["mine_pkg.nets.Net", "mine_pkg.Net", "mine_pkg.Net.made", "mine_one.One", "trainer_cli.data.x.Local"]
)
def test_a_recovered_config_may_name_the_project_and_our_components(
    mine: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.startswith("trainer_cli"):
        fake = type(sys)("trainer_cli.data.x")
        cast("Any", fake).Local = type("Local", (), {"__module__": "trainer_cli.data.x"})
        monkeypatch.setitem(sys.modules, "trainer_cli.data.x", fake)
    assert callable(targets.import_target(path, WHERE, Trust.recovered(mine, [])))


@pytest.mark.parametrize(
    "path",
    [
        "math.sqrt",
        "other.X",
        "trainer_cli.commands.command_line.main",
        "trainer_cli.config.yaml.Path",
        "mine_alias.sqrt",
    ],
)
def test_a_recovered_config_may_name_nothing_else_not_even_by_an_alias(mine: Path, path: str) -> None:
    (mine / "mine_alias.py").write_text("from math import sqrt\n")
    with pytest.raises(
        ConfigError, match=r"from a config on disk .* -cd PROJECT/configs \(in Python config_dir=.* trust=\['"
    ):
        targets.import_target(path, WHERE, Trust.recovered(mine, []))


def test_an_untrusted_package_is_not_even_imported(mine: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "mine_evil.py").write_text("raise SystemExit('imported')\n")
    sys.path.append(str(elsewhere))
    with pytest.raises(ConfigError, match="mine_evil"):
        targets.import_target("mine_evil.X", WHERE, Trust.recovered(mine, []))


def test_a_folder_of_the_projects_does_not_vouch_for_an_installed_namesake(mine: Path) -> None:
    (mine / "yaml").mkdir()
    (mine / "yaml/notes.py").write_text("")
    assert "yaml" in set(targets.find_project_packages(mine))
    import yaml

    assert not str(yaml.__file__).startswith(str(mine))
    with pytest.raises(ConfigError, match=r"comes from a config on disk"):
        targets.import_target("yaml.safe_load", WHERE, Trust.recovered(mine, []))


def test_an_environment_inside_the_project_is_not_the_project(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = mine / ".venv/lib"
    (site / "mine_installed.py").write_text("class Net: ...\n")
    (mine / "mine_installed").mkdir()
    (mine / "mine_installed/data.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    with pytest.raises(ConfigError, match=r"comes from a config on disk"):
        targets.import_target("mine_installed.Net", WHERE, Trust.recovered(mine, []))


def test_nothing_is_imported_by_way_of_an_alias(mine: Path) -> None:
    (mine / "mine_alias.py").write_text("import xml\n")
    for trust in (OWN, Trust.recovered(mine, [])):
        with pytest.raises(ConfigError):
            targets.import_target("mine_alias.xml.sax.saxutils.escape_not", WHERE, trust)
        with pytest.raises(ConfigError):
            targets.import_target("mine_alias.xml.dom.nosuch.X", WHERE, trust)


def test_a_module_that_ends_the_process_is_a_mistake_in_the_config(mine: Path) -> None:
    (mine / "mine_script.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match="importing mine_script ends the process"):
        targets.import_target("mine_script.X", WHERE, OWN)


def test_wrapped_and_nested_ones_of_the_projects_own_are_trusted(mine: Path) -> None:
    (mine / "mine_wrapped.py").write_text(
        "import contextlib, functools\n"
        "def logged(f):\n"
        "    @functools.wraps(f)\n    def inner(*a): return f(*a)\n    return inner\n"
        "@logged\ndef make(): ...\n"
        "def factory():\n    class Net:\n        def forward(self): ...\n    return Net\n"
        "Net = factory()\nNetTwo = type('NetTwo', (), {})\n"
        "class Outer:\n    class Inner: ...\n    @classmethod\n    @logged\n    def made(cls): ...\n"
    )
    for name in ("make", "Net", "NetTwo", "Outer.Inner", "Outer.made"):
        assert callable(targets.import_target(f"mine_wrapped.{name}", WHERE, Trust.recovered(mine, [])))


def test_a_checkout_of_ours_is_no_project_that_may_name_all_of_it() -> None:
    root = Path(targets.__file__).parents[2]
    for name in ("commands.command_line.main", "files.durable.replace", "running.build.Builder"):
        path = f"trainer_cli.{name}"
        with pytest.raises(ConfigError, match=r"comes from a config on disk"):
            targets.import_target(path, WHERE, Trust.recovered(root, []))


def test_a_projects_packages_are_its_own_and_no_standard_ones(mine: Path) -> None:
    assert set(targets.find_project_packages(mine)) == {"mine_pkg", "mine_one", "mine_src"}


def test_the_project_root_comes_first_on_the_path_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["a"])
    targets.import_from(tmp_path)
    targets.import_from(tmp_path)
    assert sys.path == [str(tmp_path), "a"]


def test_torchs_modules_optimizers_and_schedulers_are_trusted_and_nothing_else_of_it() -> None:
    code = """
from trainer_cli.components import targets
from trainer_cli.errors import ConfigError
import sys
assert "torch" not in sys.modules
trust = targets.Trust(frozenset())
for path in ("torch.nn.Linear", "torch.optim.AdamW", "torch.optim.lr_scheduler.StepLR", "torch.optim.Adam"):
    targets.import_target(path, "here", trust)
for path in ("torch.hub.load", "torch.load", "torch.nn.Module.apply", "torch.nn.init.zeros_"):
    try:
        targets.import_target(path, "here", trust)
    except ConfigError:
        continue
    raise SystemExit(path)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_relative_import_outside_a_package_says_what_to_do(mine: Path) -> None:
    (mine / "mine_relative.py").write_text("import os\nfrom .mine_one import One\n")
    with pytest.raises(ConfigError) as refused:
        targets.import_target("mine_relative.One", WHERE, OWN)
    assert f"{mine}/mine_relative.py:2: from .mine_one import One: it is in no package" in refused.value.what
    assert refused.value.cure == (
        "Import without the leading dot (from x import y), or move the modules into a folder with an __init__.py."
    )


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("models.gpt.GPT", marks=pytest.mark.addon("text")),
        pytest.param("callbacks.sparse_training.RigL", marks=pytest.mark.addon("sparsity")),
        "trainer.warmup.WarmupCosine",
    ],
)
@pytest.mark.parametrize("trust", [targets.Trust(), targets.Trust.recovered(Path("/nowhere"), [])], ids=["any", "disk"])
def test_a_public_class_is_found_by_the_module_in_which_it_once_was(path: str, trust: targets.Trust) -> None:
    assert targets.import_target(f"trainer_cli.{path}", WHERE, trust) is getattr(trainer_cli, path.rpartition(".")[2])


# A config found on disk that wants to run something: every target is refused, and nothing of it has run.


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project that holds what a hostile config could hope for."""
    root = tmp_path_factory.mktemp("project")
    (root / "mine_hole.py").write_text(HOLES)
    sys.path.insert(0, str(root))
    yield root
    sys.path.remove(str(root))
    sys.modules.pop("mine_hole", None)


def test_there_are_enough_targets_and_none_twice() -> None:
    assert len(set(TARGETS)) == len(TARGETS) >= 200
    assert len(set(TRUSTED)) == len(TRUSTED) >= 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", TRUST)
def test_a_hostile_target_is_a_mistake_of_the_config_and_never_runs(
    case: str, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(case, project, tmp_path)


def test_what_is_no_component_is_told_so_with_a_way_out(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch\.hub\.load .* is not a component.* Give experiment=NAME"):
        Builder(TrainConfig(), Trust.recovered(project, ["torch"])).make({"_target_": "torch.hub.load"}, "model")


LAB = """
import functools
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import torch
import trainer_cli
from torch import nn

class Net(nn.Module): ...
class Descent(torch.optim.SGD): ...
class Schedule(torch.optim.lr_scheduler.StepLR): ...
class Rows(torch.utils.data.Dataset): ...
class Stream(torch.utils.data.IterableDataset): ...
class Order(torch.utils.data.Sampler): ...
class Batches(torch.utils.data.DataLoader): ...
class Watch(trainer_cli.Callback): ...
class Log(trainer_cli.Logger): ...
class Step(trainer_cli.TrainStep): ...
@dataclass
class Settings:
    width: int = 1
class Data:
    def __init__(self): self.train = []
class Lazy:
    @property
    def train(self): return []
class Cached:
    @functools.cached_property
    def train(self): return []
class Field:
    train: list
class Inner(Data): ...
N = TypeVar("N", bound=nn.Module)
def build() -> Net: ...
def either() -> "Net | nn.Sequential": ...
def optional() -> Net | None: ...
def guess(): ...
def text() -> str: ...
def broken() -> "Missing": ...
def mixed() -> Net | str: ...
class Plain:
    def __init__(self, command): ...
class Loop:
    def train(self): ...
class Kind(Enum):
    one = 1
    @classmethod
    def make(cls): ...
class Loads(nn.Module):
    @classmethod
    def load(cls) -> "Loads": ...
    @staticmethod
    def read() -> Net: ...
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An installed package of a user, outside the project."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "lab.py").write_text(LAB)
    sys.path.insert(0, str(folder))
    yield "lab"
    sys.path.remove(str(folder))
    sys.modules.pop("lab", None)


@pytest.mark.parametrize(
    "name",
    words(
        "Net Descent Schedule Rows Stream Order Batches Watch Log Step Settings Data Lazy Cached Field Inner build"
        " either"
    ),
)
def test_trust_in_a_package_admits_what_a_training_is_made_of(name: str, lab: str, project: Path) -> None:
    builder = Builder(TrainConfig(), Trust.recovered(project, [lab]))
    assert callable(builder.make({"_target_": f"lab.{name}", "_partial_": True}, "model"))
    with pytest.raises(ConfigError, match=rf"trust=\[{lab}\]"):
        Builder(TrainConfig(), Trust.recovered(project, [])).make({"_target_": f"lab.{name}"}, "model")


@pytest.mark.parametrize(
    "name", words("guess text broken mixed optional Plain Loop Kind Kind.make Loads.load Loads.read")
)
def test_trust_in_a_package_admits_nothing_else_of_it(name: str, lab: str, project: Path) -> None:
    with pytest.raises(ConfigError, match=f"lab.{name}"):
        Builder(TrainConfig(), Trust.recovered(project, [lab])).make({"_target_": f"lab.{name}"}, "model")


def test_trust_in_torchvision_admits_its_transforms_and_says_at_once_what_else_it_admits(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As torchvision has them: classes without a base class, and functions.
    package = tmp_path / "site/torchvision"
    for folder in (package, package / "transforms"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    (package / "transforms/__init__.py").write_text("from .transforms import *\n")
    (package / "transforms/transforms.py").write_text(
        "class Compose:\n    def __init__(self, transforms): ...\nclass ToTensor: ...\ndef to_tensor(): ...\n"
    )
    (package / "io.py").write_text("class Reader: ...\n")
    present = [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
    for name in present:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(package.parent)
    transforms = [{"_target_": "torchvision.transforms.ToTensor"}]
    node = {"_target_": "torchvision.transforms.Compose", "transforms": transforms}
    with pytest.raises(
        ConfigError,
        match=r"trust=\[torchvision\] \(in Python .*\): it admits .* transforms.* else, give experiment=NAME",
    ):
        Builder(TrainConfig(), Trust.recovered(project, [])).make(node, "data.transform")
    try:
        trusting = Builder(TrainConfig(), Trust.recovered(project, ["torchvision"]))
        assert type(trusting.make(node, "data.transform")).__name__ == "Compose"
        for other in ("transforms.to_tensor", "io.Reader"):
            with pytest.raises(ConfigError, match=f"torchvision.{other} .* is not a component"):
                trusting.make({"_target_": f"torchvision.{other}"}, "data.transform")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def test_the_same_node_runs_in_a_config_of_the_users_own(tmp_path: Path) -> None:
    node = {
        "_target_": "pathlib.Path.touch",
        "_args_": [{"_target_": "pathlib.Path", "_args_": [f"{tmp_path}/canary"]}],
    }
    Builder(TrainConfig(), Trust()).make(node, "model")
    assert (tmp_path / "canary").exists(), "so the table above tells something"


@pytest.mark.parametrize("target", ["os.system", "torch.load", "mine_hole.go", "trainer_cli.files.durable.replace"])
def test_the_function_that_joins_batches_is_judged_too(target: str, project: Path) -> None:
    data = {"_target_": "trainer_cli.data.datasets.Digits", "batch_size": 4, "collate_fn": target}
    with pytest.raises(ConfigError, match=target):
        Builder(TrainConfig(data=data), Trust.recovered(project, [])).data()


ADMITTED = {
    "": """mine_hole.Net mine_hole.plain torch.nn.Linear torch.optim.SGD torch.optim.lr_scheduler.StepLR
        torch.nn.modules.linear.Linear torch.optim.swa_utils.AveragedModel trainer_cli.models.mlp.MLP
        trainer_cli.data.datasets.Digits trainer_cli.loggers.console.ConsoleLogger trainer_cli.CheckpointerCallback
        trainer_cli.optim.warmup.WarmupCosine""",
    "torch": "torch.nn.Linear torch.optim.SGD torch.utils.data.TensorDataset",
    "transformers": "transformers.GPT2LMHeadModel transformers.GPT2Config",
    "peft": "peft.LoraConfig peft.get_peft_model",
    "lightning": "lightning.LightningModule",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("trusted", "target"), [(trusted, target) for trusted, targets in ADMITTED.items() for target in words(targets)]
)
def test_what_a_run_is_made_of_is_let_through(trusted: str, target: str, project: Path) -> None:
    builder = Builder(TrainConfig(), Trust.recovered(project, words(trusted)))
    assert callable(builder.make({"_target_": target, "_partial_": True}, "model"))


@pytest.mark.parametrize("case", REACHES)
def test_a_recovered_config_writes_and_sets_nothing_beyond_its_run_unless_the_user_gives_it(
    case: str, project: Path, tmp_path: Path
) -> None:
    check_bounded(case, project, tmp_path)


@pytest.mark.parametrize("flag", ELSEWHERE)
def test_no_config_sets_an_attribute_of_a_module_that_torch_imports(flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"there is no '{flag}'"):
        Builder(TrainConfig(), Trust()).make({"_target_": "trainer_cli.ScopedFlags", "fit": {flag: "x"}}, "callbacks.x")


READ = {"EvalHarness.include_path"}
"""Arguments of callbacks and loggers that name what is read."""


def test_every_argument_that_names_a_file_to_write_is_bounded() -> None:
    found, bounded = set(), set()
    for name in trainer_cli.__all__:
        component = getattr(trainer_cli, name)
        if not (inspect.isclass(component) and issubclass(component, CheckedArguments)):
            continue
        parameters = inspect.signature(component.__init__).parameters
        found |= {f"{name}.{key}" for key in parameters if re.search(r"(^|_)(path|folder|file|dir|uri|url)$", key)}
        bounded |= {f"{name}.{key}" for key in component.writes}
    assert found - READ - {"CheckpointerCallback.folder"} == bounded


@pytest.mark.parametrize(
    ("path", "expected"),
    [(".", False), ("a/..", False), ("../run", False), ("a/b", False), ("..", True), ("../run2/x", True)],
)
def test_the_directory_of_the_run_itself_is_of_the_run(path: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert is_outside(path, tmp_path / "run") is expected
    assert is_outside(tmp_path / "run" / path, tmp_path / "run") is expected


@pytest.mark.parametrize(
    ("resume", "code"),
    [
        (["resume=runs/a"], ExitCode.USER),
        (["resume=runs/a", "loggers.more.path={outside}"], ExitCode.DONE),
        (["resume=runs/a", "loggers.more.path=more.csv"], ExitCode.DONE),
        (["+experiment=digits_mlp", "name=a", "run_dir=runs/a", "+loggers.more={node}"], ExitCode.DONE),
    ],
    ids=["found", "given", "within", "own"],
)
def test_the_user_of_a_run_may_write_elsewhere_and_a_found_config_may_not(
    resume: list[str], code: ExitCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outside = tmp_path / "precious.csv"
    node = f"{{_target_: trainer_cli.CsvLogger, path: {outside}}}"
    # By the user's own command, in a project of the user's own.
    begun = ["+experiment=digits_mlp", "name=a", f"+loggers.more={node}", "loop.max_duration=4", "loop.log_interval=2"]
    assert main(["fit", *begun]) == 0
    outside.write_text("step,epoch,time,metric,value\n")
    words = [word.replace("{outside}", str(outside)).replace("{node}", node) for word in resume]
    assert main(["fit", *words, "loop.max_duration=8", "loop.log_interval=2"]) == code
    may_write = any("{outside}" in word or "{node}" in word for word in resume)
    assert (outside.read_text() != "step,epoch,time,metric,value\n") is may_write


# Modules of a project with the name of a library: one line says so, before one is taken for the other.


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("random.py", "random.py is hidden by Python's module random"),
        ("copy/__init__.py", "copy is hidden by Python's module copy"),
        ("yaml.py", "yaml.py is hidden by the library yaml"),
        ("trainer_cli.py", "trainer_cli.py is hidden by the library trainer_cli"),
        ("mailbox.py", "mailbox.py hides Python's module mailbox"),
    ],
)
def test_a_module_with_the_name_of_a_library_is_refused(file: str, message: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    before = list(sys.path)
    with pytest.raises(ConfigError) as refused:
        import_from(tmp_path)
    assert refused.value.what == message
    assert refused.value.cure == "Rename it."
    assert sys.path == before


@pytest.mark.parametrize(
    "file", ["model.py", "test.py", "random.txt", "copy/net.py", "trainer_cli/__init__.py", "src/random.py"]
)
def test_any_other_file_is_not(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    refuse_shadows(tmp_path)


def test_the_libraries_that_this_one_depends_on_are_known() -> None:
    needed = {one.split(";")[0].split(">")[0].lower() for one in requires("trainer-cli") or () if "extra ==" not in one}
    names = {name for name, owners in packages_distributions().items() if needed & {owner.lower() for owner in owners}}
    assert {name for name in names if name.isidentifier() and not name.startswith("_")} - _LIBRARIES <= {
        "functorch", "torchgen", "hydra_plugins"
    }  # fmt: skip


def test_a_recovered_config_says_so_in_place_of_a_lack_of_trust(empty_folder: Path) -> None:
    Path("copy.py").write_text("class Net: ...\n")
    Path("config.yaml").write_text("model: {_target_: copy.Net}\n")
    with pytest.raises(ConfigError, match=r"copy\.py is hidden by Python's module copy"):
        from_yaml(Path("config.yaml"), trusted=False, missing_ok=True)


@pytest.mark.parametrize("verb", ["fit", "plan"])
def test_a_verb_says_so(verb: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("random.py").touch()
    assert main([verb, "+experiment=digits_mlp"]) == 2
    assert "error: random.py is hidden by Python's module random\n" in capsys.readouterr().err


def test_python_m_takes_no_library_from_the_current_folder(empty_folder: Path) -> None:
    for name in ("random", "copy", "yaml", "numpy", "argparse"):
        Path(f"{name}.py").write_text("raise SystemExit(9)\n")
    env = {**os.environ, "PYTHONPATH": str(Path(trainer_cli.__file__).parents[1])}
    command = [sys.executable, "-m", "trainer_cli", "plan", "+experiment=digits_mlp"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 2, done.stderr
    for name in ("random", "copy", "yaml", "numpy", "argparse"):
        assert f"{name}.py " in done.stderr
    assert "Traceback" not in done.stderr
