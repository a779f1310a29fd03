"""Every block of README.md and docs/*.md runs, in the order of its page, in one fresh directory.

sh      is run by bash, with this environment's `train`
python  is written to the file that the line above names, or run
yaml    is written to the file that the line above names, or composed as an experiment
text    is part of the output of the sh block above; numbers may differ
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:`([\w/.]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ERROR = "train: error: "


@dataclass(frozen=True)
class Page:
    """What a page needs and shows."""

    shows: tuple[str, ...] = ()
    """Patterns that are found in the output of its commands and programs."""
    trained: bool = False
    """Begin with a finished run of digits_mlp."""


PAGES = {
    "README.md": Page(
        shows=(
            r"is finished at step 675",
            r"smallest loss",
            r"finished at step 900",
            r"evaluations +\d: 135, 270",
            r"hidden:\s+(\[256, 256\]|- 256\s+- 256)",
            r"runs/mine/checkpoints/step80\s+80\s+large",
        )
    ),
    "docs/architecture.md": Page(),
    "docs/checkpoints.md": Page(
        trained=True,
        shows=(
            r"([2-9]) of \1 valid",
            r"pinned: runs/digits_mlp/checkpoints/step",
            r"^4 tensors of the model",
            r"averaged: runs/mean",
            r"^net\.\S+ of 4 exported tensors",
            r"^step20 \{",
            r"^epoch 4 \{'best_loss': 0\.25\}$",
            r"fixed_steps:\s+(\[10, 1000\]|- 10\s+- 1000)",
        ),
    ),
    "docs/configuration.md": Page(
        trained=True,
        shows=(
            r"command line: optimizer\.lr=0\.01",
            r"model\._target_: trainer_cli\.models\.mlp\.MLP -> trainer_cli\.models\.cnn\.CNN",
            r"max_duration",
            r"fixed_steps:\s+(\[7\]|- 7)",
            r"device",
        ),
    ),
    "docs/data.md": Page(shows=(r"finished at step 12", r"finished at step 10\b")),
    "docs/logging.md": Page(
        trained=True,
        shows=(
            r"675 0\.\d+",
            r"finished 675",
            r"digits_mlp +finished +675/675 +0\.\d+ +step675",
            r'"run": "runs/digits_mlp", "state": "finished"',
            r"METRICS step 675 +train/loss",
            r"finished at step 90",
        ),
    ),
    "docs/models.md": Page(shows=(r"finished at step 40", r"exported: gpt2")),
    "docs/own-project.md": Page(shows=(r"finished at step", r"exact")),
    "docs/python.md": Page(shows=(r"^90 0\.[5-9]\d*$",)),
    "docs/resume.md": Page(
        shows=(
            r"resuming at step 300",
            r"finished at step 675",
            r"config changed: optimizer\.lr: 0\.003 -> 0\.001",
            r"finished at step 2\b",
            r"resuming at step 450",
        )
    ),
    "docs/sweeps.md": Page(shows=(r"(?s)(finished.*){2}",)),
    "docs/training.md": Page(shows=(r"finished at step 180",)),
    "docs/training-step.md": Page(shows=(r"finished at step 8\b", r"^8 \['discriminator', 'generator'\]$")),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished run of digits_mlp."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "output").write_text(Reader(folder).sh("train fit +experiment=digits_mlp"))
    return folder


@dataclass
class Reader:
    """Runs the blocks of a page in `folder`; each begins where the one before it ended."""

    folder: Path
    output: str = ""
    """All that was printed."""
    cwd: Path = field(init=False)

    def __post_init__(self) -> None:
        self.cwd = self.folder

    def sh(self, script: str, code: int = 0) -> str:
        """Run shell lines; the output of both streams."""
        after = self.folder / ".cwd"
        body = f'train() {{ "{sys.executable}" -m trainer_cli "$@"; }}\nset -e\n{script}\npwd >"{after}"'
        printed = self._run(["bash", "-c", body], code)
        if code == 0:
            self.cwd = Path(after.read_text().strip())
        return printed

    def python(self, program: str) -> str:
        """Run a program with warnings as errors."""
        return self._run([sys.executable, "-W", "error", "-c", program])

    def block(self, language: str, text: str, file: str) -> None:
        """Run, write or compose one block."""
        if file:
            (self.cwd / file).parent.mkdir(parents=True, exist_ok=True)
            (self.cwd / file).write_text(text)
        elif language == "python":
            self.python(text)
        else:
            assert language == "yaml", f"blocks of {language} are not run"
            experiment = self.folder / ".configs/experiment/shown.yaml"
            experiment.parent.mkdir(parents=True, exist_ok=True)
            experiment.write_text(f"# @package _global_\n{text}")
            self.sh(f"train config --config-dir '{experiment.parents[1]}' +experiment=shown")

    def _run(self, command: list[str], code: int = 0) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        done = subprocess.run(
            command, cwd=self.cwd, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert done.returncode == code, f"{command[-1]}\n{done.stdout}"
        self.output += done.stdout
        return done.stdout


def _shapes(text: str) -> list[str]:
    """The lines of an output, with # for each number."""
    return [re.sub(r"\d[\d.,:]*(e[+-]\d+)?", "#", line).rstrip() for line in text.splitlines() if line.strip()]


def _by_thread(shapes: list[str]) -> tuple[list[str], list[str]]:
    """The lines of the training, and those of the commits, which a background save logs when the disk is done."""
    commits = [line for line in shapes if line.startswith("committed ")]
    return [line for line in shapes if line not in commits], commits


def _assert_shown(shown: str, printed: str) -> None:
    for wanted, present in zip(_by_thread(_shapes(shown)), _by_thread(_shapes(printed)), strict=True):
        lines = iter(present)
        missing = [line for line in wanted if line not in lines]
        assert not missing, f"these lines are not in the output, or in another order:\n{missing}\n{printed}"


def _blocks(page: str) -> list[tuple[str, str, str]]:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def test_every_page_is_in_the_table() -> None:
    assert set(PAGES) == {"README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))}


@pytest.mark.timeout(580)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_as_it_stands(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    reader = Reader(tmp_path)
    if PAGES[page].trained:
        shutil.copytree(request.getfixturevalue("trained"), tmp_path, dirs_exist_ok=True)
    blocks = _blocks(page)
    for (file, language, text), (_, following, shown) in zip(blocks, [*blocks[1:], ("", "", "")], strict=True):
        if language == "sh" and not text.startswith("scripts/"):
            printed = reader.sh(text, code=2 if shown.startswith(ERROR) else 0)
            if following == "text":
                _assert_shown(shown, printed)
        elif language not in ("sh", "text"):
            reader.block(language, text, file)
    for pattern in PAGES[page].shows:
        assert re.search(pattern, reader.output, re.MULTILINE), f"{pattern} is not in the output:\n{reader.output}"


def test_the_mistakes_in_the_readme_are_reported_exactly_as_shown(tmp_path: Path) -> None:
    blocks = _blocks("README.md")
    (at,) = (index for index, (_, _, text) in enumerate(blocks) if text.startswith(ERROR))
    assert Reader(tmp_path).sh(blocks[at - 1][2], code=2) == blocks[at][2]


def test_the_first_commands_of_the_readme_are_the_scripts() -> None:
    names = re.findall(r"^(scripts/\w+)", _blocks("README.md")[0][2], re.MULTILINE)
    assert names == ["scripts/quickstart", "scripts/test"]


def test_the_quickstart_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """With 4 batches in each epoch, and in an environment that is installed: the script would use the network."""
    if not Path(sys.prefix, ".installed").exists():
        pytest.skip("the environment was not made by scripts/install")
    short = f"loop.limit_train_batches=4 loop.log_interval=4 run_dir='{tmp_path}/digits'"
    printed = Reader(tmp_path).sh(f"VENV='{sys.prefix}' '{ROOT}/scripts/quickstart' {short}")
    _assert_shown(_blocks("README.md")[1][2], printed.replace(str(tmp_path), "runs"))


def test_the_picture_of_a_run_shows_the_present_output(trained: Path) -> None:
    picture = (ROOT / "docs/run.svg").read_text(encoding="utf-8")
    lines = re.findall(r'<text class="run-r\d+" [^>]*clip-path[^>]*>(.*?)</text>', picture)
    prompt, *shown = html.unescape("\n".join(lines)).replace("\xa0", " ").splitlines()
    assert prompt.strip() == "$ train fit +experiment=digits_mlp"
    present = _by_thread(_shapes((trained / "output").read_text()))
    assert _by_thread(_shapes("\n".join(shown))) == present, "run scripts/screenshot"


def test_the_table_of_experiments_is_complete() -> None:
    shipped = {path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml")}
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == shipped
