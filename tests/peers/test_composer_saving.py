"""The claims of Composer's own tests about saving checkpoints."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from composer_training import (
    STEPS,
    StopAt,
    assert_same,
    make_trainer,
    names,
    saved_by,
    saver,
    train_loader,
    weights,
)
from peer_claims import Claim, claims, each, try_claim

import trainer_cli as tc
from trainer_cli.commands.main import main


def check_other_stores_are_refused(folder: Path, url: str) -> None:
    with pytest.raises(tc.UserError, match="://"):
        tc.CheckpointerCallback(url)


def check_refused_compression(folder: Path, compression: str) -> None:
    with pytest.raises(tc.ConfigError, match=f"compression is '{compression}'.*one of none, gz"):
        saver(format="archive", compression=compression)


def check_second_saver(folder: Path) -> None:
    with pytest.raises(tc.UserError, match="One saves"):
        make_trainer(callbacks=[saver("second")], checkpoint=saver("first"))
    # What a second one is for: parts of some checkpoints in another folder.
    copies = tc.SaveCheckpointState(["model"], every=4, folder=str(folder / "second"))
    make_trainer(8, callbacks=[copies], checkpoint=saver("first", save_interval=2)).fit(train_loader())
    assert (names("first"), names("second")) == (["step2", "step4", "step6", "step8"], ["step4", "step8"])


class FailsAt(tc.Callback):
    """Puts something into the checkpoint of a step that no checkpoint can hold."""

    def __init__(self, step: int) -> None:
        self.step = step

    def postprocess_checkpoint(self, trainer: tc.Trainer, state: dict[str, Any]) -> None:
        if trainer.progress.step == self.step:
            state["extra"] = object()


def check_link_after_a_failed_save(folder: Path) -> None:
    trainer = make_trainer(4, callbacks=[FailsAt(4)], checkpoint=saver(save_interval=2, latest_link=True))
    with pytest.raises(tc.TrainError, match="extra"):
        trainer.fit(train_loader())
    assert names() == ["step2"]
    assert Path("checkpoints/latest").resolve().name == "step2"
    with pytest.raises(tc.ConfigError, match="can hold no link"):
        tc.CheckpointerCallback("memory://saved", latest_link=True)


def check_latest_link(folder: Path) -> None:
    trainer = make_trainer("2ep", checkpoint=saver(name="ep{epoch}-ba{batch}", save_interval="1ep", latest_link=True))
    trainer.fit(train_loader())
    assert Path("checkpoints/latest").resolve() == tc.latest_checkpoint("checkpoints").resolve()
    other = make_trainer(seed=1)
    other.load_checkpoint("checkpoints/latest")
    assert other.progress.step == 2 * STEPS
    assert_same(weights(other), weights(trainer))


def check_folder_and_name(folder: Path, kind: type[str] | type[Path]) -> None:
    made = make_trainer("2ep", checkpoint=saver(kind("a/folder"), name="ep{epoch}-ba{batch}", save_interval="1ep"))
    made.fit(train_loader())
    assert names("a/folder") == ["ep1-ba0", "ep2-ba0"]
    if kind is Path:
        with pytest.raises(tc.ConfigError, match=r"name is .*must be a text"):
            saver(name=Path("ep{epoch}-ba{batch}"))


def check_name_with_batch(folder: Path) -> None:
    made = make_trainer(8, checkpoint=saver(name="ep{epoch}-ba{batch}", save_interval=4))
    made.fit(train_loader())
    assert names() == ["ep0-ba4", "ep1-ba3"]


def check_defaults(folder: Path) -> None:
    def fit(duration: str, ckpt_path: Any) -> None:
        make_trainer(duration, checkpoint=tc.CheckpointerCallback(save_async=False)).fit(
            train_loader(), ckpt_path=ckpt_path
        )

    fit("3ep", None)
    assert names() == ["step0", "step10", "step15", "step5"]
    with pytest.raises(tc.UserError, match="would not be replaced"):
        fit("3ep", None)


def check_local_folder(folder: Path) -> None:
    assert saved_by(2, folder="foo/bar/baz", save_interval=1) == [1, 2]


def check_rotation(folder: Path, kept: int | None) -> None:
    steps = saved_by(6, save_interval=1, max_checkpoints=kept)
    assert steps == list(range(1, 7))[-(kept or 6) :]


def check_none_kept(folder: Path) -> None:
    with pytest.raises(tc.ConfigError, match="max_checkpoints is 0"):
        saver(max_checkpoints=0)


class Without(tc.Callback):
    """Leaves a state out of the checkpoints."""

    def __init__(self, key: str) -> None:
        self.key = key

    def postprocess_checkpoint(self, trainer: tc.Trainer, state: dict[str, Any]) -> None:
        del state[self.key]


def check_left_out(folder: Path, key: str) -> None:
    for name, callbacks in (("whole", []), ("less", [Without(key)])):
        make_trainer(2, callbacks=callbacks, checkpoint=saver(name, save_interval=2)).fit(train_loader())
    read = tc.make_sync_checkpointer().read
    whole, less = read(Path("whole/step2")), read(Path("less/step2"))
    assert set(whole) - set(less) == {key}
    assert not set(less) - set(whole)


def check_going_back(folder: Path, newer: str) -> None:
    """To step 5, in a folder with step 10."""
    straight = make_trainer(10, checkpoint=saver(save_interval=5))
    straight.fit(train_loader())
    before = Path("checkpoints/step10/manifest.json").read_bytes()
    again = make_trainer(10, checkpoint=saver(save_interval=5, newer=newer))
    if newer == "refuse":
        with pytest.raises(tc.UserError, match="newer"):
            again.fit(train_loader(), ckpt_path="checkpoints/step5")
        assert Path("checkpoints/step10/manifest.json").read_bytes() == before
    else:
        again.fit(train_loader(), ckpt_path="checkpoints/step5")
        assert names() == ["step10", "step5"]
        assert Path("checkpoints/step10/manifest.json").read_bytes() != before
        assert_same(weights(straight), weights(again))


def check_whole_state(folder: Path) -> None:
    saved_by(2, save_interval=2)
    state = tc.make_sync_checkpointer().read(Path("checkpoints/step2"))
    assert {"model", "optimizer", "schedulers", "rng", "progress", "data"} <= set(state)


def check_weights_only(folder: Path) -> None:
    copies = tc.SaveCheckpointState(["model"], folder=str(folder / "weights"))
    trainer = make_trainer(2, callbacks=[copies], checkpoint=saver(save_interval=2))
    trainer.fit(train_loader())
    state = tc.make_sync_checkpointer().read(Path("weights/step2"))
    assert set(state) == {"model", "progress"}
    other = make_trainer(seed=1)
    other.load_checkpoint("weights/step2", tc.LoadOptions(states=["model"]))
    assert_same(weights(trainer), weights(other))


def check_torch_file(folder: Path) -> None:
    trainer = make_trainer(2, checkpoint=saver(save_interval=2, format="torch_file"))
    trainer.fit(train_loader())
    (path,) = Path("checkpoints/step2").glob("*.pt")
    tensors = torch.load(path, weights_only=True)["tensors"]
    assert_same(weights(trainer), {name: tensors[f"model/{name}"] for name in weights(trainer)})


def archive_of(compression: str) -> Path:
    trainer = make_trainer(2, checkpoint=saver(compression, save_interval=2, format="archive", compression=compression))
    trainer.fit(train_loader())
    (path,) = Path(compression, "step2").glob("*.tar*")
    other = make_trainer(seed=1)
    other.load_checkpoint(Path(compression, "step2"))
    assert_same(weights(trainer), weights(other))
    return path


def check_archive(folder: Path, compression: str) -> None:
    """Python's tarfile reads it, and the program what is in it."""
    path = archive_of(compression)
    with tarfile.open(path) as archive:
        assert "rank0.safetensors" in {Path(name).name for name in archive.getnames()}
    plain = b"rank0.safetensors" in path.read_bytes()
    assert plain is (compression == "none")


def check_compressed_is_smaller(folder: Path) -> None:
    assert archive_of("gz").stat().st_size < archive_of("none").stat().st_size


def check_unknown_archive(folder: Path) -> None:
    saved_by(2, save_interval=2)
    assert main(["ckpt", "export", "checkpoints/step2", "--output", "x.tar.unknownalgorithm"]) == 2
    assert not list(Path().glob("x.tar*"))


def check_retention_after_a_restart(folder: Path) -> None:
    def fit(*callbacks: tc.Callback) -> None:
        made = make_trainer(10, callbacks=callbacks, checkpoint=saver(save_interval=2, max_checkpoints=3))
        made.fit(train_loader())

    fit(StopAt(6))
    assert names() == ["step2", "step4", "step6"]
    fit()
    assert names() == ["step10", "step6", "step8"]


CLAIMS: list[Claim] = [
    *claims(
        "test_checkpoint: TestCheckpointSaving.test_other_uris_error_out",
        check_other_stores_are_refused,
        {
            f"{url} is refused before the training": (url,)
            for url in ("gcs://foo/bar", "sftp://foo/bar", "wandb://foo/bar")
        },
    ),
    *claims(
        "test_checkpoint: test_checkpoint_filenames",
        check_latest_link,
        {"A link to the newest checkpoint is there, and can be loaded": ()},
    ),
    *claims(
        "test_checkpoint: test_checkpoint_invalid_compressor",
        check_refused_compression,
        {"An unknown compression is refused when the callback is made": ("unknown_compressor",)},
    ),
    *claims(
        "test_checkpoint: test_checkpoint_multiple_callbacks",
        check_second_saver,
        {"Two savers may save into two folders": ()},
        difference="One saver saves what is resumed, and a second is refused; SaveCheckpointState copies chosen states "
        "into another folder at its own interval.",
    ),
    *claims(
        "test_checkpoint: test_checkpoint_remote_symlink",
        check_link_after_a_failed_save,
        {"A save that fails leaves the link at the checkpoint before": ()},
        difference="An object store holds no links: a link there is refused, and the manifest, sent last, marks what "
        "is complete. In a local folder the link moves once the checkpoint is committed.",
    ),
    *claims(
        "test_checkpoint: test_checkpoint_saver_folder_filename_path",
        check_folder_and_name,
        {"Folder and name may be strings": (str,)},
    ),
    *claims(
        "test_checkpoint: test_checkpoint_saver_folder_filename_path",
        check_folder_and_name,
        {"Folder and name may be paths": (Path,)},
        difference="The folder may be a Path; a name is a pattern for the name of one folder, so it is a text, and a "
        "Path is refused.",
    ),
    *claims(
        "test_checkpoint: test_checkpoint_saver_folder_filename_path, name",
        check_name_with_batch,
        {"Epoch and batch may be in the name": ()},
    ),
    *claims(
        "test_checkpoint: test_checkpoint_saver_properly_constructed",
        check_defaults,
        {"By default each epoch is saved, all are kept, and none is written over": ()},
    ),
    *claims(
        "test_checkpoint: test_local_paths_work",
        check_local_folder,
        {"A folder within folders that are not there is made": ()},
    ),
    *claims(
        "test_checkpoint: test_rotate_checkpoints",
        check_rotation,
        {f"Of six checkpoints {kept or 'all'} are kept": (kept,) for kept in (1, 2, 3, 4, None)},
    ),
    *claims(
        "test_checkpoint: test_rotate_checkpoints, none",
        check_none_kept,
        {"Keeping none is refused, as the newest stays": ()},
    ),
    *claims(
        "test_checkpoint: test_save_ignore_keys",
        check_left_out,
        {f"{key} can be left out of the checkpoints": (key,) for key in ("callbacks", "model", "rng")},
    ),
    *claims(
        "test_checkpoint: test_save_overwrite",
        check_going_back,
        {
            "Going back to an older checkpoint beside newer ones is refused": ("refuse",),
            "Going back replaces the newer ones where that is wanted": ("trash",),
        },
    ),
    *claims(
        "test_checkpoint: test_save_weights_only", check_whole_state, {"By default more than the weights is saved": ()}
    ),
    *claims(
        "test_checkpoint: test_save_weights_only",
        check_weights_only,
        {"Only the weights are saved where that is wanted": ()},
        difference="The run's own checkpoints stay whole, so that it can be resumed; SaveCheckpointState saves the "
        "weights and the counts of the step beside them.",
    ),
    *claims(
        "test_checkpoint: test_write_checkpoint_pt_file",
        check_torch_file,
        {"torch.load reads a checkpoint of that format": ()},
    ),
    *claims(
        "test_checkpoint: test_write_checkpoint_tar_file",
        check_archive,
        {
            f"An archive with compression {compression} is a tar file, and is loaded": (compression,)
            for compression in ("bz2", "gz", "lzma", "none", "xz")
        },
    ),
    *claims(
        "test_checkpoint: test_write_checkpoint_tar_file",
        check_compressed_is_smaller,
        {"A compressed archive is smaller than one that is not": ()},
    ),
    *claims(
        "test_checkpoint: test_write_checkpoint_tar_file",
        check_unknown_archive,
        {"An ending that names no known compression is refused, and nothing is written": ()},
    ),
    *claims(
        "test_checkpoint: test_write_directly_compressed_pickle",
        check_refused_compression,
        {"A checkpoint may be compressed by lz4": ("lz4",)},
        difference="Compression is that of Python itself (gz, bz2, xz, lzma); what would need a command of the system "
        "is refused with the names that there are.",
    ),
    *claims(
        "checkpoint/test_checkpoint_saver: test_stateful_checkpoint_saver",
        check_retention_after_a_restart,
        {"What was saved before a restart counts when old checkpoints are removed": ()},
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
