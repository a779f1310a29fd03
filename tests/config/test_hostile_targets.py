"""A config found on disk that wants to run something: every target is refused, and nothing of it has run."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_targets import ELSEWHERE, HOLES, REACHES, TARGETS, TRUST, TRUSTED, check_bounded, check_refused, words

import trainer_cli
from trainer_cli.commands.command_line import main
from trainer_cli.components.targets import Trust
from trainer_cli.errors import ConfigError, ExitCode
from trainer_cli.running.build import Builder
from trainer_cli.running.reach import is_outside
from trainer_cli.schema.sections import TrainConfig
from trainer_cli.signatures.calls import CheckedArguments


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
        ConfigError, match=r"trust=\[torchvision\]\. It admits .* transforms.* else, give experiment=NAME"
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
        trainer_cli.addons.text.text.Text trainer_cli.loggers.console.ConsoleLogger trainer_cli.CheckpointerCallback
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
