"""Mutants of the saver: each removes one fsync, rename, lock, barrier or check on which a promise rests.

`python scripts/mutants.py saver` runs them, and prints which test or fault class noticed each.
"""

from __future__ import annotations

_AT_ANY = "tests/checkpoint/test_faults.py"
"""An error, a kill or a power cut at any operation of a save, a removal and a replacement."""
_KILLS = f"{_AT_ANY}::test_a_kill_at_any_operation_loses_nothing"
_STORAGES, _CATALOGS = "tests/checkpoint/test_storage.py::TestLocalStorage", "tests/checkpoint/test_catalog.py"
_SAVED_IN_ORDER = f"{_STORAGES}::test_everything_is_at_rest_before_the_folder_gets_its_name_and_that_too"
_REMOVED_IN_ORDER = f"{_STORAGES}::test_a_removal_takes_the_manifest_away_first_and_for_good"
_LOADS, _RANKS = "tests/checkpoint/test_load.py", "tests/checkpoint/test_group_save.py"
_STORES, _MACHINES = "tests/addons/stores/test_object_store.py", "tests/addons/stores/test_machines.py"
_COPIES = "tests/addons/stores/test_copier.py"
_MIRRORS, _REMOVALS = "tests/addons/stores/test_mirror.py", "tests/addons/stores/test_removal.py"
_CHECKPOINTER = "tests/checkpoint/test_checkpointer.py"
_FAILED_SAVES = "tests/callbacks/test_saves.py"
_POWER_CUTS = f"{_AT_ANY}::test_a_power_cut_at_any_operation_loses_nothing"

OF_SAVER: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    # fsync
    "a file is not fsynced": ("LocalFileWriter.finish", "self._disk.fsync(self._fd)", "", (_POWER_CUTS,)),
    "a small file beside the checkpoint is not fsynced": (
        "write_file",
        "disk.fsync(fd)",
        "",
        (_POWER_CUTS,),
    ),
    "the folder is not fsynced before its rename": (
        "LocalStorage._publish",
        "self.disk.fsync_dir(staging)",
        "",
        (_POWER_CUTS,),
    ),
    "the folder is not fsynced before it replaces another": (
        "LocalStorage._replace",
        "self.disk.fsync_dir(staging)",
        "",
        (_POWER_CUTS,),
    ),
    "the parent is not fsynced after the rename": (
        "LocalStorage._publish",
        "self.fsync_names()",
        "",
        (_POWER_CUTS,),
    ),
    "the parent is not fsynced before the replaced one is deleted": (
        "LocalStorage._replace",
        "self.fsync_names()",
        "",
        (_POWER_CUTS,),
    ),
    "the parent of a new folder for checkpoints is not fsynced": (
        "LocalStorage._create_root",
        "self.disk.fsync_dir(path.parent)",
        "",
        (_POWER_CUTS,),
    ),
    "the parent of a folder that another process made is not fsynced": (
        "LocalStorage._create_root",
        "self.disk.fsync_dir(root.parent)",
        "",
        (_POWER_CUTS,),
    ),
    "the folder is not fsynced after its manifest is removed": (
        "LocalStorage.remove",
        "self.disk.fsync_dir(path)",
        "",
        (_POWER_CUTS, _REMOVED_IN_ORDER),
    ),
    "the parent is not fsynced after a removal": (
        "LocalStorage._move_to_trash",
        "self.disk.fsync_dir(self.root)",
        "",
        (_POWER_CUTS, _REMOVED_IN_ORDER),
    ),
    "the folder is not fsynced after a manifest is amended": (
        "LocalStorage.amend",
        "self.disk.fsync_dir(path)",
        "",
        (_POWER_CUTS,),
    ),
    "the records are not durable before the checkpoint": (
        "StateSaver.before_commit",
        "self.trainer.metric_logger.make_durable()",
        "",
        (_FAILED_SAVES,),
    ),
    "a failed fsync is repeated": (
        "LocalFileWriter.finish",
        "self._disk.fsync(self._fd)",
        "try:\n    self._disk.fsync(self._fd)\nexcept OSError:\n    self._disk.fsync(self._fd)",
        (f"{_AT_ANY}::test_a_save_whose_fsync_failed_begins_anew_instead_of_trusting_a_second_fsync",),
    ),
    # Order and names
    "a folder is written under its final name": (
        "LocalStorage.writing",
        "self._hidden_path(Hidden.tmp, name)",
        "final",
        (_SAVED_IN_ORDER,),
    ),
    "the manifest is sent before the files": (
        "ObjectFolders.receive",
        "self._take(name)",
        "self._take(name)\nself.client.put_new(f'{name}/{MANIFEST_FILE}', manifest)",
        (_MIRRORS, _STORES),
    ),
    "ranks send the manifest when it is made": (
        "RankFolder.create",
        "self._manifest = (self.path / file).read_bytes()",
        "self._manifest = (self.path / file).read_bytes()\nself._put_manifest()",
        (_MACHINES,),
    ),
    "a removal deletes the files before the manifest": (
        "LocalStorage.remove",
        "if not lock_out_readers(self.disk, path, stack):\n    return False",
        (
            "if not lock_out_readers(self.disk, path, stack):\n"
            "    return False\n"
            "for file in self.disk.listdir(path):\n"
            "    if file != MANIFEST_FILE:\n"
            "        self.disk.unlink(path / file)"
        ),
        (_REMOVED_IN_ORDER,),
    ),
    "a removal in a store deletes the manifest last": (
        "ObjectFolders.remove",
        "self.client.delete(f'{name}/{MANIFEST_FILE}')\nself._delete_objects(name)",
        "self._delete_objects(name)\nself.client.delete(f'{name}/{MANIFEST_FILE}')",
        (_MACHINES,),
    ),
    "a removal in a store is not marked": (
        "ObjectFolders.remove",
        "self.client.put(f'{name}/{self._markers[0]}', b'')",
        "",
        (_REMOVALS,),
    ),
    "a sweep of a store leaves no claim before it looks for a manifest": (
        "ObjectFolders.clear",
        "self._put_claim(name)",
        "",
        (_STORES,),
    ),
    "a sweep of a store trusts its listing": (
        "ObjectFolders.clear",
        "self._is_committed(name)",
        "False",
        (_STORES,),
    ),
    "a manifest is sent without a look at the claim": (
        "ObjectFolders.commit",
        "self._check_claim(name, self._claim)",
        "",
        (_MIRRORS,),
    ),
    "a sender does not look at the claim after the manifest": (
        "ObjectFolders.commit",
        "claim not in (None, self._claim) or (may_be_changed and (not self._has_files(name, files)))",
        "may_be_changed and (not self._has_files(name, files))",
        (_STORES,),
    ),
    "two processes of a run share a claim": (
        "ObjectFolders.__init__",
        "secrets.token_hex(8)",
        "''",
        (_MIRRORS,),
    ),
    "a file that is sent late replaces one of a later attempt": (
        "ObjectFolders.send_file",
        "not self.client.upload_new(f'{name}/{file}', path, check, on_part)",
        "self.client.put(f'{name}/{file}', path.read_bytes())",
        (_MIRRORS, _MACHINES),
    ),
    "a file is sent without a look at its digest": (
        "ObjectFolders._send",
        "verify(source, manifest, [file])",
        "",
        (_MIRRORS,),
    ),
    "a manifest that is amended while its checkpoint is sent is not sent": (
        "Mirror._run",
        "self._queue.get(name) is waiting",
        "True",
        (_MIRRORS,),
    ),
    "a copy that is abandoned goes on": (
        "_Source.open.read_at",
        "self._mirror.is_abandoned",
        "False",
        (_COPIES,),
    ),
    "a place that is full is tried for each checkpoint": (
        "Mirror._run",
        "is_of_place",
        "False",
        (_COPIES,),
    ),
    "a checkpoint that cannot be read keeps others from their copies": (
        "Mirror._run",
        "getattr(error, 'errno', 0) in _OF_PLACE and (not is_of_source)",
        "getattr(error, 'errno', 0) in _OF_PLACE",
        (_COPIES,),
    ),
    "a checkpoint that waits for its copy is not held over a restart": (
        "CheckpointerCallback._open_folder",
        "self._last_saved_step = _step_of(self.retention.newest(trainer.progress.step))",
        (
            "self._last_saved_step = _step_of(self.retention.newest(trainer.progress.step))\n"
            "self.retention.retire(self._last_saved_step)"
        ),
        (_COPIES,),
    ),
    "a checkpoint of another run is replaced by a copy": (
        "Mirror._is_amended",
        "there.run_id == own.run_id",
        "True",
        (f"{_COPIES}::test_another_runs_checkpoint_is_not_replaced",),
    ),
    "the old one is deleted before it is replaced": (
        "LocalStorage._replace",
        "old = self._swap(staging, name)",
        "old = self._move_to_trash(name)\nself.disk.rename(staging, final)",
        (_KILLS,),
    ),
    # Checks
    "digests are not compared": (
        "VerifiedFile.__exit__",
        "f'{self._entry.algorithm}:{self._digest.hexdigest()}' != self._entry.digest",
        "False",
        (_LOADS, _CATALOGS),
    ),
    "sizes are not compared when a file is read": (
        "VerifiedFile.__enter__",
        "self._source.size_bytes != self._entry.size_bytes",
        "False",
        (f"{_LOADS}::test_a_file_of_another_size_is_refused_before_it_is_read",),
    ),
    "sizes are not compared when checkpoints are listed": (
        "_compare_sizes",
        "sizes[file] != entry.size_bytes",
        "False",
        (_CATALOGS,),
    ),
    "missing files are not noticed when checkpoints are listed": (
        "_compare_sizes",
        "return (manifest, f'{file} is missing')",
        "continue",
        (_CATALOGS,),
    ),
    "the digest of a manifest is not compared": (
        "_is_intact",
        "data.endswith(end) and digest == _digest_of(data[:-len(end)])",
        "True",
        ("tests/core/test_manifest.py", _CATALOGS),
    ),
    "a resume does not verify": (
        "Catalog.why_damaged",
        "check(folder, entry.manifest)",
        "",
        (_CATALOGS,),
    ),
    "weights that are not finite are resumed": (
        "newest_intact",
        "entry.manifest.finite",
        "True",
        (
            "tests/callbacks/test_checkpointer.py::test_weights_that_are_not_finite_are_saved_but_never_chosen_nor_counted",
        ),
    ),
    "a damaged checkpoint in the way of a save counts as saved": (
        "is_saved",
        "verify(folder, manifest)",
        "",
        (f"{_CHECKPOINTER}::test_a_step_whose_bytes_were_altered_is_quarantined_and_written_again",),
    ),
    "another run's checkpoint counts as saved": (
        "is_saved",
        "metadata.run_id and (manifest.run_id, manifest.step) == (metadata.run_id, metadata.step)",
        "metadata.run_id",
        (_CHECKPOINTER,),
    ),
    "a valid checkpoint of that name is replaced": (
        "LocalStorage._refuse_existing",
        "exists(self.disk, final / MANIFEST_FILE)",
        "False",
        (_STORAGES,),
    ),
    "what is to be removed is not looked at again": (
        "Retention._apply_policy",
        "not self.catalog.look_again(deciding)",
        "True",
        ("tests/callbacks/test_many_checkpoints.py", "tests/checkpoint/test_histories.py"),
    ),
    "a sweep takes other runs' folders": (
        "LocalStorage._is_leftover",
        "hidden.kind in kinds and hidden.run_id == self.run_id and (name not in self._staged)",
        "hidden.kind in kinds and name not in self._staged",
        (_STORAGES,),
    ),
    # Ranks
    "another rank's failure does not stop the commit": (
        "GroupSave.finish",
        "_first_failure([failure for _, failure in reports])",
        "None",
        (_RANKS,),
    ),
    "rank 0 commits before the others have written": (
        "GroupSave.finish",
        "self.group.gather_on_main((own_report, _failure_of(error)))",
        "[(own_report, _failure_of(error))]",
        (_RANKS,),
    ),
    "a rank goes on before it is known whether the checkpoint exists": (
        "GroupSave.finish",
        "self.group.broadcast(first_failure)",
        "first_failure",
        (_RANKS,),
    ),
    "holes between the parts of ranks are not noticed": (
        "GroupSave._commit",
        "problem is not None",
        "False",
        (_RANKS,),
    ),
    "a part that another rank found damaged is taken": (
        "GroupVerifier.verify",
        "verify(folder, manifest, unverified)",
        "",
        ("tests/checkpoint/test_group_save.py",),
    ),
    # Locks
    "a run directory is not locked": (
        "lock_file",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "None",
        ("tests/runs/test_run_dir.py",),
    ),
    "a checkpoint that is read is removed": (
        "lock_out_readers",
        "if not disk.lock(fd, exclusive=True):\n    return False",
        "",
        (_STORAGES,),
    ),
    "a reader takes no lock": (
        "LocalStorage.reading",
        "self.disk.lock(fd, exclusive=False)",
        "True",
        (_STORAGES,),
    ),
    "a reader keeps the lock of a manifest that was replaced": (
        "LocalStorage.reading",
        "not is_same_file(self.disk, fd, path / MANIFEST_FILE)",
        "False",
        (_STORAGES,),
    ),
    # The copy
    "a save in the background writes the live tensors": (
        "CopyStager.stage",
        "self.buffer.capture(layout, trained)",
        "Snapshot(layout, trained)",
        ("tests/checkpoint/test_snapshot_buffer.py", "tests/checkpoint/test_async_checkpointer.py"),
    ),
}
