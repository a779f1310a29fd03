"""What a fit returns: the same from the same seed in every process, and from a run that was finished already."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, loader, trainer

from trainer_cli import CheckpointerCallback

PAGE = Path(__file__).parents[2] / "docs/python.md"


@pytest.fixture
def never_seeded() -> Any:
    """Torch's generator as a new process has it: seeded by chance."""
    before = torch.get_rng_state()
    torch.seed()
    yield
    torch.set_rng_state(before)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_duration": 5},
        {"max_duration": 5, "eval_interval": 2, "log_interval": 2},
        {"max_duration": 9, "hard_stop": 5, "log_interval": 2},
    ],
)
def test_a_finished_run_returns_again_what_it_reported(settings: dict[str, Any], tmp_path: Path) -> None:
    def fitted() -> Any:
        made = trainer(settings=settings, checkpoint=CheckpointerCallback(tmp_path))
        return made.fit(loader(12, 4), loader(4, 4, shuffle=False))

    first, again = fitted(), fitted()
    assert (again.finished, again.step, again.metrics) == (True, 5, first.metrics)
    assert "val/loss" in again.metrics


def test_a_run_that_goes_on_returns_what_it_measured_itself(tmp_path: Path) -> None:
    settings = {"max_duration": 3, "log_interval": None}
    trainer(settings=settings, checkpoint=CheckpointerCallback(tmp_path)).fit(loader(12, 4), loader(4, 4))
    longer = trainer(settings={**settings, "max_duration": 4}, checkpoint=CheckpointerCallback(tmp_path))
    assert longer.fit(loader(12, 4)).metrics.keys() == {"train/loss", "train/lr", "train/mae", "train/samples_per_s"}
    weights_alone = trainer(settings={"max_duration": 1})
    weights_alone.load_checkpoint(tmp_path / "step4")
    assert weights_alone.fit(loader(12, 4)).step == 4


def test_the_first_example_of_the_page_gives_the_same_in_every_process(
    never_seeded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example, *_) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    printed = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        torch.seed()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(example, "example", "exec"), {})
        first, again = output.getvalue().splitlines()
        assert first == again
        printed.append(first)
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("model", "seed", "seeded", "warned"),
    [
        ("module", 0, False, True),
        ("module", 0, True, False),
        ("class", 0, False, False),
        ("module", None, False, False),
    ],
)
def test_a_seed_that_comes_too_late_for_the_weights_is_a_warning(
    model: str, seed: int | None, seeded: bool, warned: bool, never_seeded: None, caplog: pytest.LogCaptureFixture
) -> None:
    if seeded:
        torch.manual_seed(3)
    trainer(Line() if model == "module" else Line, seed=seed)
    assert ("made before the seed was set" in caplog.text) is warned
