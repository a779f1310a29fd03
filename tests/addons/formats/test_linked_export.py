"""What is exported of a checkpoint does not depend on whether its frozen tensors are in a file that others share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_cli.commands.command_line import main

pytestmark = pytest.mark.slow

TRAINING = [
    "experiment=digits_mlp", "model.hidden=[1024,1024]", "freeze=[layers.1.*,layers.4.*]", "loop.max_duration=4",
    "loop.eval_interval=null", "loggers.tensorboard=null", "checkpoint.save_interval=2", "checkpoint.remove=never",
    "logging.console=off",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        assert main(["fit", *TRAINING, "run_dir=linked"]) == 0
        assert main(["fit", *TRAINING, "run_dir=written", "checkpoint.link_frozen=false"]) == 0
        yield Path.cwd()


@pytest.mark.parametrize("more", [[], ["--dtype", "bfloat16"]], ids=["as stored", "bfloat16"])
@pytest.mark.parametrize("format", ["safetensors", "torch", "huggingface"])
def test_an_export_of_a_linked_checkpoint_is_that_of_one_without_links(
    runs: Path, format: str, more: list[str]
) -> None:
    contents = []
    for run in ("linked", "written"):
        # Of the same name, which the format of torch contains.
        out = runs / run / f"{format}{len(more)}"
        assert main(["ckpt", "export", f"{run}/checkpoints/step4", "--format", format, "-o", str(out), *more]) == 0
        files = [out] if out.is_file() else sorted(out.iterdir())
        contents.append([file.read_bytes() for file in files])
    frozen = list((runs / "linked/checkpoints").glob("step*/rank0.frozen.safetensors"))
    assert [path.stat().st_nlink for path in frozen] == [3, 3, 3]
    assert contents[0]
    assert contents[0] == contents[1]
