"""Runs the blocks of a page, in the order of the page, in one folder, and compares what they print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from printed import untimed

ROOT = Path(__file__).parents[2]
ERROR = "error: "
NOTEBOOK = "python.md"
"""The page whose Python blocks are the cells of one notebook: one program."""
SERVER = Path(__file__).with_name("command_server.py")
BLOCK = re.compile(r"(?:`([\w/.]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@contextmanager
def command_server() -> Iterator[Path]:
    """A folder with scripts `train` and `python`, whose commands start at once; see command_server.py."""
    with tempfile.TemporaryDirectory() as folder:
        # What its commands get, too: one thread, and this package.
        env = environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        server = subprocess.Popen(
            [sys.executable, str(SERVER), folder], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n", "what is imported there fails: see stderr"
        yield Path(folder)
        server.communicate()
        assert server.returncode == 0


def environment(**more: str) -> dict[str, str]:
    """The environment of a command: nothing of the caller's Python, so that only what is installed can be imported."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**outside, "PYTHONUNBUFFERED": "1", **more}


def of_addon(name: str, *patterns: str) -> tuple[str, ...]:
    """What a page shows if this add-on is there."""
    return patterns if (ROOT / "trainer_cli/addons" / name).is_dir() else ()


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(file named by the line above or "", language, text) of each block of a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@dataclass
class Reader:
    """Runs the blocks of a page in `folder`; each begins where the one before it ended."""

    folder: Path
    commands: Path
    """The folder of the scripts `train` and `python`."""
    short: str = ""
    """Overrides, separated by spaces, for every `train fit`."""
    output: str = ""
    """All that was printed."""
    cwd: Path = field(init=False)

    def __post_init__(self) -> None:
        self.cwd = self.folder

    def page(self, page: Path) -> None:
        """Run every block of a page; commands of this project's own `scripts/` are left out."""
        parts = blocks(page)
        if page.name == NOTEBOOK:
            cells = [text for _, language, text in parts if language == "python"]
            parts = [("", "python", "\n".join(cells))]
        for number, (file, language, text) in enumerate(parts, 1):
            _, following, shown = parts[number] if number < len(parts) else ("", "", "")
            try:
                if language == "sh" and not text.startswith("scripts/"):
                    printed = self.sh(text, code=2 if shown.startswith(ERROR) else 0)
                    # With a prompt it is the output of the command that it shows.
                    if following == "text" and not shown.startswith("$ "):
                        assert_shown(shown, printed)
                elif language not in ("sh", "text"):
                    self.block(language, text, file)
            except AssertionError as error:
                error.add_note(f"block {number} of {len(parts)}")
                raise

    def sh(self, script: str, code: int = 0) -> str:
        """Run shell lines; the output of both streams."""
        after = self.folder / ".cwd"
        printed = self._run(["bash", "-c", f'set -e\n{script}\npwd >"{after}"'], code)
        if code == 0:
            self.cwd = Path(after.read_text().strip())
        return printed

    def python(self, program: str) -> str:
        """Run a program with warnings as errors."""
        return self._run(["python", "-c", program])

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
        env = environment(PATH=f"{self.commands}:{os.environ['PATH']}", PAGES_SHORT=self.short)
        command[0] = shutil.which(command[0], path=env["PATH"]) or command[0]
        done = subprocess.run(
            command, cwd=self.cwd, text=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert done.returncode == code, f"exit code {done.returncode}, not {code}:\n{command[-1]}\n{done.stdout}"
        printed = untimed(done.stdout)
        self.output += printed
        return printed


def shapes(text: str) -> list[str]:
    """The lines of an output, with # for each number, and two spaces where columns are aligned by their lengths."""
    lines = [re.sub(r"\d[\d.,:]*(e[+-]\d+)?", "#", line).rstrip() for line in text.splitlines() if line.strip()]
    return [re.sub(r"(?<=\S) {2,}", "  ", line) for line in lines]


def by_thread(shapes: list[str]) -> tuple[list[str], list[str]]:
    """The lines of the training, and those of the commits, which a background save logs when the disk is done.

    The line of the device, which differs between machines, is left out.
    """
    commits = [line for line in shapes if line.startswith("committed ")]
    return [line for line in shapes if line not in commits and not line.startswith("device ")], commits


def assert_shown(shown: str, printed: str) -> None:
    for wanted, present in zip(by_thread(shapes(shown)), by_thread(shapes(printed)), strict=True):
        lines = iter(present)
        missing = [line for line in wanted if line not in lines]
        assert not missing, f"these lines are not in the output, or in another order:\n{missing}\n{printed}"
