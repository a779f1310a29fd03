"""What each page with blocks needs and shows; `python run_pages.py FOLDER [PAGE ...]` runs pages by a real command.

FOLDER holds `train` and `python` of the environment in which trainer-cli is installed. Prints the seconds of each page,
and for a page that fails its block, that block and what it printed. tests/test_readme.py runs the same table by the
command server.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from reader import ROOT, Reader, of_addon


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
            r"finished at step 900",
            r"evaluations +\d: 135, 270",
            r"hidden:\s+(\[256, 256\]|- 256\s+- 256)",
            r"runs/mine/checkpoints/step80\s+80\s+large",
            *of_addon("view", r"report\.html: 1 run"),
        )
    ),
    "docs/index.md": Page(shows=(r"finished at step", r"is finished", *of_addon("view", r"report\.html: 1 run"))),
    "docs/auto.md": Page(shows=(r"(?s)(finished at step.*){2}", r"^rate 0\.\d+", r"^batch 256$")),
    "docs/callbacks.md": Page(shows=(r"finished at step 20\b",)),
    "docs/fine-tuning.md": Page(shows=(r"(?s)(finished at step.*){3}",)),
    "docs/formats.md": Page(trained=True, shows=(r"averaged: runs/mean", r"^net\.\S+ of 4 exported tensors")),
    "docs/freezing.md": Page(shows=(r"finished at step 5\b",)),
    "docs/how-checkpoints-work.md": Page(trained=True, shows=(r"^4 tensors of the model",)),
    "docs/huggingface.md": Page(
        shows=(
            r"finished at step",
            *of_addon("text", r"(?s)(finished at step.*){2}", *of_addon("formats", r"exported: merged")),
            *of_addon("formats", r"exported: gpt2"),
        )
    ),
    "docs/moving.md": Page(shows=(r"grad_accum_steps: 2",)),
    "docs/predict.md": Page(shows=(r'^\{"sample": 0, ',)),
    "docs/own-callback.md": Page(shows=(r"(?s)(finished at step \d+: val/loss is steady.*){2}",)),
    "docs/own-model.md": Page(shows=(r"finished at step \d+: max_duration of 10,?000 tokens",)),
    "docs/precheck.md": Page(shows=(r"will take",)),
    "docs/watch.md": Page(shows=(r"finished at step",)),
    "docs/schedules.md": Page(shows=(r"(?s)(finished at step.*){3}",)),
    "docs/tutorial.md": Page(
        shows=(r"(?s)(finished at step.*){7}", *of_addon("view", r"spiral\.html: 1 run", r"sweep\.html: 4 runs"))
    ),
    "docs/checkpoints.md": Page(
        trained=True,
        shows=(
            r"([2-9]) of \1 valid",
            r"pinned: runs/digits_mlp/checkpoints/step",
            r"fixed_steps:\s+(\[10, 1000\]|- 10\s+- 1000)",
        ),
    ),
    "docs/compare.md": Page(shows=(r"B is better than A: mean difference \d", r"after 4 pairs")),
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
    "docs/data.md": Page(shows=(r"finished at step \d+: max_duration of 2 epochs",)),
    "docs/distributed.md": Page(shows=(r"finished at step 20\b", r"evaluation")),
    "docs/logging.md": Page(
        trained=True,
        shows=(
            r"675 0\.\d+",
            r"finished 675",
            r"digits_mlp +finished +675/675 +0\.\d+ +0\.\d+ +\d+\.\d% +step675",
            r'"run": "runs/digits_mlp", "state": "finished"',
            r"METRICS step 675 +train/loss",
            r"finished at step 90",
        ),
    ),
    "docs/look-inside.md": Page(
        shows=(
            r"^runs/digits_mlp: replays 7 steps from step30",
            r"^verified: equal at 1 of 1 record",
            r"^runs/digits_mlp@step36 was not kept: replays 6 steps from step30",
            r"^\*? +runs/digits_mlp/replayed/step37 +37 ",
            r"^diverge before step 1: settings of the optimizer .*eps \(1e-08 -> 1e-06\)",
            r"(?s)(^equal up to step 60: 12 records and 3 checkpoints$.*){2}",
        )
    ),
    "docs/notebooks.md": Page(shows=(r"finished at step 675", r"finished at step 270")),
    "docs/own-project.md": Page(shows=(r"finished at step", *of_addon("exact", r"exact"))),
    "docs/python.md": Page(
        shows=(
            r"^MLP False$",
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
    "docs/stores.md": Page(),
    "docs/sweeps.md": Page(shows=(r"(?s)(finished.*){2}",)),
    "docs/text.md": Page(shows=(r"finished at step 12", r"(?s)(finished at step 10\b.*){2}")),
    "docs/training.md": Page(shows=(r"finished at step 180",)),
    "docs/training-step.md": Page(shows=(r"finished at step 8\b", r"^8 \['discriminator', 'generator'\]$")),
    "docs/view.md": Page(trained=True, shows=(r"report\.html: 1 run, \d+ charts",)),
}
# That of an add-on may have been deleted with it.
PAGES = {name: page for name, page in PAGES.items() if (ROOT / name).exists()}


def train_digits(folder: Path, commands: Path) -> None:
    """Make in `folder` what a page with `trained` begins with."""
    (folder / "output").write_text(Reader(folder, commands).sh("train fit digits_mlp"), encoding="utf-8")


def run_page(name: str, folder: Path, commands: Path) -> None:
    """Run every block of a page in `folder`, which must hold a finished run if the page needs one.

    Raises:
        AssertionError: a block failed, or the output lacks what the page shows.
    """
    reader = Reader(folder, commands)
    reader.page(ROOT / name)
    for pattern in PAGES[name].shows:
        assert re.search(pattern, reader.output, re.MULTILINE), f"{pattern} is not in the output:\n{reader.output}"


def main(commands: Path, names: list[str]) -> int:
    """Run pages, all if none is named, each in a folder of its own; the exit code."""
    if unknown := [name for name in names if name not in PAGES]:
        print(f"no page with blocks: {', '.join(unknown)}; there are {', '.join(PAGES)}", file=sys.stderr)
        return 2
    names = names or [*PAGES]
    begin, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        trained = Path(scratch, "trained")
        trained.mkdir()
        if any(PAGES[name].trained for name in names):
            train_digits(trained, commands)
        for index, name in enumerate(names):
            folder = Path(scratch, str(index))
            shutil.copytree(trained, folder) if PAGES[name].trained else folder.mkdir()
            start = time.monotonic()
            try:
                run_page(name, folder, commands)
            except AssertionError as error:
                failed.append(name)
                print(", ".join([name, *getattr(error, "__notes__", ())]), error, sep=":\n", flush=True)
            print(f"{time.monotonic() - start:4.0f} s   {name}", flush=True)
    print(f"{time.monotonic() - begin:4.0f} s   {len(names)} page{'s' * (len(names) > 1)}", flush=True)
    if failed:
        print(f"pages that fail: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
