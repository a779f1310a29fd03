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
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from reader import ERROR, ROOT, Reader, assert_shown, blocks, command_server, environment
from run_pages import PAGES, Page, main, run_page, train_digits


@pytest.fixture(scope="module")
def commands() -> Iterator[Path]:
    """The folder of `train` and `python` for the blocks."""
    with command_server() as folder:
        yield folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, commands: Path) -> Path:
    """A directory with a finished run of digits_mlp."""
    folder = tmp_path_factory.mktemp("trained")
    train_digits(folder, commands)
    return folder


def test_every_page_with_blocks_is_in_the_table() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert set(PAGES) == {page.relative_to(ROOT).as_posix() for page in pages if blocks(page)}
    # A block that is indented or has no language would not be run.
    fences = {page: re.findall(r"^ *(?:```|~~~)", page.read_text(encoding="utf-8"), re.MULTILINE) for page in pages}
    assert [page for page in pages if len(fences[page]) != 2 * len(blocks(page))] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_as_it_stands(page: str, tmp_path: Path, commands: Path, request: pytest.FixtureRequest) -> None:
    if PAGES[page].trained:
        shutil.copytree(request.getfixturevalue("trained"), tmp_path, dirs_exist_ok=True)
    run_page(page, tmp_path, commands)


def test_the_mistakes_in_the_readme_are_reported_exactly_as_shown(tmp_path: Path, commands: Path) -> None:
    parts = blocks(ROOT / "README.md")
    (at,) = (index for index, (_, _, text) in enumerate(parts) if text.startswith(ERROR))
    assert Reader(tmp_path, commands).sh(parts[at - 1][2], code=2) == parts[at][2]


def test_the_first_commands_of_the_readme_are_the_scripts() -> None:
    names = re.findall(r"^(scripts/\w+)", blocks(ROOT / "README.md")[0][2], re.MULTILINE)
    assert names == ["scripts/quickstart", "scripts/test"]


def test_a_newcomer_trains_is_killed_resumes_evaluates_and_reports(tmp_path: Path, commands: Path) -> None:
    """As `scripts/newcomer` does, in an environment that is installed already; with the shortest of the pages."""
    (tmp_path / "bin").symlink_to(commands)
    printed = Reader(tmp_path, commands).sh(f"VENV='{tmp_path}' '{ROOT}/scripts/newcomer' docs/moving.md")
    times = re.findall(r"^ *\d+ s   (.*)$", printed, re.MULTILINE)
    assert [" ".join(line.split()[:2]) for line in times] == [
        "train fit", "train fit", "train validate", "train report", "train serve", "write, fail,", "in all",
        "docs/moving.md", "1 page",
    ]  # fmt: skip
    assert "(killed)" in times[0]
    assert "(resumed)" in times[1]


@pytest.mark.addon("inspect")
@pytest.mark.addon("text")
def test_a_page_asks_for_what_the_newcomer_installs_beside_the_package() -> None:
    script = (ROOT / "scripts/newcomer").read_text(encoding="utf-8")
    ((extra, packages),) = re.findall(r'\.whl\)\[(\w+)\]" (.*)$', script, re.MULTILINE)
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for package in (rf"trainer-cli\[{extra}\]", *packages.split()):
        assert re.search(rf"pip install '?{package}(?!\w)", text), package


def test_a_page_that_fails_is_named_with_its_block_and_what_that_printed(
    tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, silent = (str(tmp_path / name) for name in ("good.md", "bad.md", "silent.md"))
    for page, block in ((good, "echo shown"), (bad, "echo broken; false"), (silent, ":")):
        Path(page).write_text(f"# A page\n\n```sh\n:\n```\n\n```sh\n{block}\n```\n")
        monkeypatch.setitem(PAGES, page, Page(shows=("^shown$",)))
    assert main(commands, [good, bad, silent]) == 1
    printed, errors = capsys.readouterr()
    assert f"{bad}, block 2 of 2:\nexit code 1, not 0:" in printed
    assert re.search(r"^echo broken; false\n(.*\n)+broken$", printed, re.MULTILINE)
    assert f"{silent}:\n^shown$ is not in the output" in printed
    assert errors == f"pages that fail: {bad}, {silent}\n"
    assert main(commands, ["docs/none.md"]) == 2


def test_an_environment_without_pip_is_made_whole_by_the_install(tmp_path: Path) -> None:
    """As venv of Debian leaves it without the package python3-venv."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$1 $2 $3" >>{tmp_path}/calls\n')
    python.chmod(0o755)
    env = environment(PYTHON=str(python), VENV=str(tmp_path / "venv"), HASHES="")
    done = subprocess.run([ROOT / "scripts/install"], env=env, check=True, stderr=subprocess.PIPE, text=True)
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("-m")]
    assert calls == [f"-m venv {tmp_path}/venv", "-m pip install", "-m pip install"]
    # Nothing is silent for minutes.
    said = re.findall(r"^scripts/install: (\w+)", done.stderr, re.MULTILINE)
    assert said == ["making", "pip", "compiling"]


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
    assert prompt.strip() == "$ train fit digits"
    printed = Reader(tmp_path, commands).sh("train fit digits loop.max_duration=45")
    labels = [line.split("  ")[0] for line in printed.splitlines() if re.match(r"\w+ {2,}\S", line)][:7]
    assert labels == ["run", "model", "optimizer", "data", "device", "evaluates", "saves"]
    text = "\n".join(shown)
    assert [label for label in labels if not re.search(rf"^{label} +$", text, re.MULTILINE)] == [], "scripts/screenshot"
    (record,) = (line.split() for line in printed.splitlines() if line.startswith("step=45/"))
    names = [
        part.partition("=")[0].rpartition("/")[2] for part in record if "samples" not in part and "eta" not in part
    ]
    (header,) = (line.split() for line in shown if line.lstrip().startswith("step  epoch"))
    assert sorted(header) == sorted([*names, "samples/s", "time"]), "run scripts/screenshot"
    assert re.search(r"step \d+/900  \d+%  epoch ", text)


def test_the_picture_of_a_killed_run_shows_that_its_resume_is_exact() -> None:
    picture = (ROOT / "docs/resume.svg").read_text(encoding="utf-8")
    lines = re.findall(r'<text class="resume-r\d+" [^>]*clip-path[^>]*>(.*?)</text>', picture)
    text = html.unescape("\n".join(line.rstrip() for line in lines)).replace("\xa0", " ")
    _, killed, resumed, checked = re.split(r"^\$ (?=train)", text, flags=re.MULTILINE)
    first, second = (session.splitlines()[0].strip() for session in (killed, resumed))
    assert first == second == "train fit digits_mlp"
    assert re.search(r"^Killed$", killed.replace(" ", ""), re.MULTILINE)
    assert "finished at step" not in killed
    assert "resuming at step 225" in resumed
    assert "finished at step 675" in resumed
    assert checked.startswith("train check resume digits_mlp")
    assert re.search(r"^exact: \d stops resumed, bit for bit", checked, re.MULTILINE)


@pytest.mark.parametrize("name", ["report", "compare"])
def test_the_picture_of_a_report_is_small(name: str) -> None:
    content = (ROOT / f"docs/{name}.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 300_000


def test_the_table_of_experiments_is_complete() -> None:
    folders = (ROOT / "configs", *ROOT.glob("trainer_cli/addons/*/configs"))
    shipped = {path.stem for folder in folders for path in (folder / "experiment").glob("*.yaml")}
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == shipped
