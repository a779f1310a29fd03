"""What TensorBoard shows of a run that was killed and resumed three times: each step once, and one description."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from command import hold, make_project, running, trained
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

SHOWS = '''
"""Logs a text, an image and a histogram at each eighth step, and waits at the steps named in the current folder."""

import os
import time

from trainer_cli import Callback


class Shows(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        step = trainer.progress.step
        if step % 8 == 0:
            trainer.log_text("text", str(step))
            trainer.log_image("image", batch[0][None].clamp(0, 1))
            trainer.log_histogram("weights", model.out.weight)
        while os.path.exists(f"hold-{step}"):
            open(f"at-{step}", "w").close()
            time.sleep(0.01)

    def on_after_evaluation(self, trainer, metrics):
        trainer.log_text("evaluation", f"{trainer.progress.step}: {sorted(metrics)}")
'''
FIT = ("experiment=mine", "+callbacks.shows={_target_: mine.shows.Shows}", "checkpoint.save_async=false")


def shown(run: Path) -> EventAccumulator:
    kinds = ("scalars", "tensors", "images", "histograms")
    return EventAccumulator(str(run / "tensorboard"), size_guidance=dict.fromkeys(kinds, 0)).Reload()


def test_three_kills_and_resumes_leave_no_step_doubled_or_lost(tmp_path: Path) -> None:
    project = make_project(tmp_path, **{"mine/shows.py": SHOWS})
    run = project / "runs/mine"
    for step in (14, 27, 37):
        held = hold(project, str(step))
        with running("fit", *FIT, cwd=project) as fit:
            fit.reach(str(step))
            fit.signal(signal.SIGKILL)
            fit.end()
        held.unlink()
    trained(*FIT, cwd=project)
    found = shown(run)
    scalars = {tag: [one.step for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert scalars.pop("val/loss") == scalars.pop("val/far") == [16, 32, 40]
    assert {tag: steps for tag, steps in scalars.items() if steps != list(range(4, 41, 4))} == {}
    assert "train/loss" in scalars
    eighth = [8, 16, 24, 32, 40]
    assert texts(found, "text/text_summary") == [(step, str(step)) for step in eighth]
    assert texts(found, "evaluation/text_summary") == [
        (step, f"{step}: ['val/far', 'val/loss']") for step in (16, 32, 40)
    ]
    assert [one.step for one in found.Images("image")] == eighth
    assert [one.step for one in found.Histograms("weights")] == eighth
    assert len(list((run / "tensorboard").iterdir())) == 4

    (config,) = texts(found, "config")
    assert config == (0, "".join(f"    {line}\n" for line in (run / "config.yaml").read_text().splitlines()))
    info = HParamsPluginData.FromString(found.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content)
    values = {name: value.string_value or value.number_value for name, value in info.session_start_info.hparams.items()}
    assert info.session_start_info.group_name == "mine (runs)"
    assert (values["model.width"], values["data.batch_size"], values["loop.max_duration"]) == (8, 8, "40st")


def texts(found: EventAccumulator, tag: str) -> list[tuple[int, Any]]:
    return [(one.step, one.tensor_proto.string_val[0].decode()) for one in found.Tensors(tag)]
