"""Every block of README.md and docs/*.md runs, in the order of its page, in one fresh directory.

sh      is run by bash, with this environment's `train`
python  is written to the file that the line above names, or run
yaml    is written to the file that the line above names, or composed as an experiment
text    is part of the output of the sh block above; numbers may differ
"""

from __future__ import annotations

import html
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("pages")))

from reader import ERROR, ROOT, Reader, assert_shown, blocks, command_server


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
            r"smallest val/loss",
            r"report\.html: 1 run",
            r"finished at step 900",
            r"evaluations +\d: 135, 270",
            r"hidden:\s+(\[256, 256\]|- 256\s+- 256)",
            r"runs/mine/checkpoints/step80\s+80\s+large",
        )
    ),
    "docs/callbacks.md": Page(shows=(r"finished at step 20\b",)),
    "docs/fine-tuning.md": Page(shows=(r"(?s)(finished at step.*){3}",)),
    "docs/freezing.md": Page(shows=(r"finished at step 5\b",)),
    "docs/how-checkpoints-work.md": Page(trained=True, shows=(r"^4 tensors of the model",)),
    "docs/huggingface.md": Page(shows=(r"(?s)(finished at step.*){2}", r"exported: gpt2", r"exported: merged")),
    "docs/moving.md": Page(shows=(r"grad_accum_steps: 2",)),
    "docs/predict.md": Page(shows=(r'^\{"sample": 0, ',)),
    "docs/own-callback.md": Page(shows=(r"(?s)(finished at step \d+: val/loss is steady.*){2}",)),
    "docs/own-model.md": Page(shows=(r"finished at step \d+: max_duration of 10,?000 tokens",)),
    "docs/schedules.md": Page(shows=(r"(?s)(finished at step.*){3}",)),
    "docs/tutorial.md": Page(shows=(r"spiral\.html: 1 run", r"sweep\.html: 4 runs", r"(?s)(finished at step.*){7}")),
    "docs/checkpoints.md": Page(
        trained=True,
        shows=(
            r"([2-9]) of \1 valid",
            r"pinned: runs/digits_mlp/checkpoints/step",
            r"averaged: runs/mean",
            r"^net\.\S+ of 4 exported tensors",
            r"fixed_steps:\s+(\[10, 1000\]|- 10\s+- 1000)",
        ),
    ),
    "docs/configuration.md": Page(
        trained=True,
        shows=(
            r"command line: optimizer\.lr=0\.01",
            r"model\._target_: trainer_cli\.MLP -> trainer_cli\.CNN",
            r"max_duration",
            r"fixed_steps:\s+(\[7\]|- 7)",
            r"device",
        ),
    ),
    "docs/debugging.md": Page(
        shows=(r"^batch\.0: \(32, 1, 8, 8\) float32 from", r"hard_stop at 6 steps", r"finished at step 20"),
    ),
    "docs/data.md": Page(shows=(r"finished at step 12", r"finished at step 10\b")),
    "docs/distributed.md": Page(shows=(r"finished at step 20\b", r"evaluation")),
    "docs/logging.md": Page(
        trained=True,
        shows=(
            r"675 0\.\d+",
            r"finished 675",
            r"digits_mlp +finished +675/675 +0\.\d+ +\d+\.\d% +step675",
            r'"run": "runs/digits_mlp", "state": "finished"',
            r"METRICS step 675 +train/loss",
            r"report\.html: 1 run, \d charts",
            r"finished at step 90",
        ),
    ),
    "docs/look-inside.md": Page(
        shows=(
            r"^runs/digits_mlp: replays 7 steps from step30",
            r"^verified: equal at 1 of 1 records",
            r"^runs/digits_mlp@step36 was not kept: replays 6 steps from step30",
            r"^\*? +runs/digits_mlp/replayed/step37 +37 ",
            r"^diverge before step 1: settings of the optimizer .*eps \(1e-08 -> 1e-06\)",
        )
    ),
    "docs/own-project.md": Page(shows=(r"finished at step", r"exact")),
    "docs/python.md": Page(
        shows=(
            r"^MLP False$",
            r"^rate 0\.\d+",
            r"^batch 256$",
            r"^90 0\.[5-9]\d*$",
            r"^True 45 .*val/accuracy",
            "^from step 45 on",
            "validate_1.*accuracy",
            r"^80 val 0\.[5-9]",
        )
    ),
    "docs/without-trainer.md": Page(shows=(r"^step20 \{", r"^epoch 4 \{'best_loss': 0\.25\}$")),
    "docs/resume.md": Page(
        shows=(
            r"resuming at step 300",
            r"finished at step 675",
            r"config changed: optimizer\.lr: 0\.003 -> 0\.001",
            r"finished at step 2\b",
            r"resuming at step 450",
        )
    ),
    "docs/sparsity.md": Page(shows=(r"finished at step 90\b",)),
    "docs/sweeps.md": Page(shows=(r"(?s)(finished.*){2}",)),
    "docs/training.md": Page(shows=(r"finished at step 180",)),
    "docs/training-step.md": Page(shows=(r"finished at step 8\b", r"^8 \['discriminator', 'generator'\]$")),
}


@pytest.fixture(scope="module")
def commands() -> Iterator[Path]:
    """The folder of `train` and `python` for the blocks."""
    with command_server() as folder:
        yield folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, commands: Path) -> Path:
    """A directory with a finished run of digits_mlp."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "output").write_text(Reader(folder, commands).sh("train fit +experiment=digits_mlp"))
    return folder


def test_every_page_with_blocks_is_in_the_table() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert set(PAGES) == {page.relative_to(ROOT).as_posix() for page in pages if blocks(page)}


@pytest.mark.timeout(580)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_as_it_stands(page: str, tmp_path: Path, commands: Path, request: pytest.FixtureRequest) -> None:
    reader = Reader(tmp_path, commands)
    if PAGES[page].trained:
        shutil.copytree(request.getfixturevalue("trained"), tmp_path, dirs_exist_ok=True)
    reader.page(ROOT / page)
    for pattern in PAGES[page].shows:
        assert re.search(pattern, reader.output, re.MULTILINE), f"{pattern} is not in the output:\n{reader.output}"


def test_the_mistakes_in_the_readme_are_reported_exactly_as_shown(tmp_path: Path, commands: Path) -> None:
    parts = blocks(ROOT / "README.md")
    (at,) = (index for index, (_, _, text) in enumerate(parts) if text.startswith(ERROR))
    assert Reader(tmp_path, commands).sh(parts[at - 1][2], code=2) == parts[at][2]


def test_the_first_commands_of_the_readme_are_the_scripts() -> None:
    names = re.findall(r"^(scripts/\w+)", blocks(ROOT / "README.md")[0][2], re.MULTILINE)
    assert names == ["scripts/quickstart", "scripts/test"]


def test_a_newcomer_trains_is_killed_resumes_evaluates_and_reports(tmp_path: Path, commands: Path) -> None:
    """As `scripts/newcomer` does, in an environment that is installed already."""
    (tmp_path / "bin").symlink_to(commands)
    (tmp_path / ".installed").touch()
    printed = Reader(tmp_path, commands).sh(f"VENV='{tmp_path}' '{ROOT}/scripts/newcomer'")
    times = re.findall(r"^ *\d+ s   (.*)$", printed, re.MULTILINE)
    assert [" ".join(line.split()[:2]) for line in times] == [
        "train fit", "train fit", "train validate", "train report", "train serve", "in all",
    ]  # fmt: skip
    assert "(killed)" in times[0]
    assert "(resumed)" in times[1]


def test_the_quickstart_prints_what_the_readme_shows(tmp_path: Path, commands: Path) -> None:
    """With 4 batches in each epoch, and in an environment that is installed: the script would use the network."""
    if not Path(sys.prefix, ".installed").exists():
        pytest.skip("the environment was not made by scripts/install")
    short = f"loop.limit_train_batches=4 loop.log_interval=4 run_dir='{tmp_path}/digits'"
    printed = Reader(tmp_path, commands).sh(f"VENV='{sys.prefix}' '{ROOT}/scripts/quickstart' {short}")
    assert_shown(blocks(ROOT / "README.md")[1][2], printed.replace(str(tmp_path), "runs"))


def test_the_picture_of_a_run_shows_the_present_display(tmp_path: Path, commands: Path) -> None:
    picture = (ROOT / "docs/run.svg").read_text(encoding="utf-8")
    lines = re.findall(r'<text class="run-r\d+" [^>]*clip-path[^>]*>(.*?)</text>', picture)
    prompt, *shown = html.unescape("\n".join(lines)).replace("\xa0", " ").splitlines()
    assert prompt.strip() == "$ train fit +experiment=digits"
    printed = Reader(tmp_path, commands).sh("train fit +experiment=digits loop.hard_stop=45")
    labels = [line.split("  ")[0] for line in printed.splitlines() if re.match(r"\w+ {2,}\S", line)][:8]
    assert labels == ["run", "config", "device", "model", "data", "batch", "steps", "saves"]
    text = "\n".join(shown)
    assert [label for label in labels if not re.search(rf"^{label}  +\S", text, re.MULTILINE)] == [], (
        "scripts/screenshot"
    )
    (record,) = (line.split() for line in printed.splitlines() if line.startswith("step=45/"))
    metrics = {part.partition("=")[0] for part in record} - {"eta"}
    (header,) = (line.split() for line in shown if line.lstrip().startswith("step  epoch"))
    assert {*header} == metrics | {"time"}, "run scripts/screenshot"
    assert re.search(r"step \d+/900  \d+%  epoch ", text)


def test_the_picture_of_a_killed_run_shows_that_its_resume_is_exact() -> None:
    picture = (ROOT / "docs/resume.svg").read_text(encoding="utf-8")
    lines = re.findall(r'<text class="resume-r\d+" [^>]*clip-path[^>]*>(.*?)</text>', picture)
    text = html.unescape("\n".join(line.rstrip() for line in lines)).replace("\xa0", " ")
    _, killed, resumed, checked = re.split(r"^\$ (?=train)", text, flags=re.MULTILINE)
    first, second = (session.splitlines()[0].strip() for session in (killed, resumed))
    assert first == second == "train fit +experiment=digits_mlp"
    assert re.search(r"^Killed$", killed.replace(" ", ""), re.MULTILINE)
    assert "finished at step" not in killed
    assert "resuming at step 225" in resumed
    assert "finished at step 675" in resumed
    assert checked.startswith("train check resume +experiment=digits_mlp")
    assert re.search(r"^exact: \d stops resumed, bit for bit", checked, re.MULTILINE)


def test_the_picture_of_a_report_is_small() -> None:
    content = (ROOT / "docs/report.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 300_000


def test_the_table_of_experiments_is_complete() -> None:
    shipped = {path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml")}
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == shipped
