"""Mutants of the saver: each removes one fsync, rename, lock, barrier or check on which a promise rests.

`python scripts/mutants.py saver` runs them, and prints which test or fault class noticed each.
"""

from __future__ import annotations

_LOCAL, _FOLDER = "trainer_cli/storage/local.py", "trainer_cli/storage/folder.py"
_SAVE, _GROUP = "trainer_cli/checkpoint/save.py", "trainer_cli/checkpoint/group_save.py"
_FOLDERS, _MIRROR = "trainer_cli/addons/stores/object_folders.py", "trainer_cli/addons/stores/mirror.py"
_CATALOG, _VERIFIED = "trainer_cli/catalog/catalog.py", "trainer_cli/tensor_files/verified_file.py"
_MANIFEST, _LOCKS = "trainer_cli/manifest.py", "trainer_cli/storage/manifest_lock.py"
_RETENTION, _SAVER = "trainer_cli/callbacks/retention.py", "trainer_cli/callbacks/state_saver.py"

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
    "a file is not fsynced": (_FOLDER, "        self._disk.fsync(self._fd)\n", "", (_POWER_CUTS,)),
    "a small file beside the checkpoint is not fsynced": (
        _FOLDER, "        disk.fsync(fd)\n    finally:\n        disk.close(fd)\n",
        "    finally:\n        disk.close(fd)\n", (_POWER_CUTS,),
    ),
    "the folder is not fsynced before its rename": (
        _LOCAL, "        self.disk.fsync_dir(staging)\n        self._clear_final_name(name)\n",
        "        self._clear_final_name(name)\n", (_POWER_CUTS,),
    ),
    "the folder is not fsynced before it replaces another": (
        _LOCAL, "        self.disk.fsync_dir(staging)\n        with ExitStack() as stack:\n",
        "        with ExitStack() as stack:\n", (_POWER_CUTS,),
    ),
    "the parent is not fsynced after the rename": (
        _LOCAL, "        self._staged.discard(staging.name)\n        self.fsync_names()\n",
        "        self._staged.discard(staging.name)\n", (_POWER_CUTS,),
    ),
    "the parent is not fsynced before the replaced one is deleted": (
        _LOCAL, "            self.fsync_names()\n            self._later(", "            self._later(", (_POWER_CUTS,),
    ),
    "the parent of a new folder for checkpoints is not fsynced": (
        _LOCAL, "                continue\n            self.disk.fsync_dir(path.parent)\n",
        "                continue\n", (_POWER_CUTS,),
    ),
    "the parent of a folder that another process made is not fsynced": (
        _LOCAL, "            self.disk.fsync_dir(root.parent)\n", "            pass\n", (_POWER_CUTS,),
    ),
    "the folder is not fsynced after its manifest is removed": (
        _LOCAL, "removed_marker(self.run_id))\n                self.disk.fsync_dir(path)\n",
        "removed_marker(self.run_id))\n", (_POWER_CUTS, _REMOVED_IN_ORDER),
    ),
    "the parent is not fsynced after a removal": (
        _LOCAL, "        self._undeleted.add(trash)\n        self.disk.fsync_dir(self.root)\n",
        "        self._undeleted.add(trash)\n", (_POWER_CUTS, _REMOVED_IN_ORDER),
    ),
    "the folder is not fsynced after a manifest is amended": (
        _LOCAL, "            self.disk.rename(new, path / MANIFEST_FILE)\n            self.disk.fsync_dir(path)\n",
        "            self.disk.rename(new, path / MANIFEST_FILE)\n", (_POWER_CUTS,),
    ),
    "the records are not durable before the checkpoint": (
        _SAVER, "take away.\n        self.trainer.metric_logger.make_durable()\n", "take away.\n",
        (_FAILED_SAVES,),
    ),
    "a failed fsync is repeated": (
        _FOLDER, "        self._disk.fsync(self._fd)\n",
        "        try:\n            self._disk.fsync(self._fd)\n"
        "        except OSError:\n            self._disk.fsync(self._fd)\n",
        (f"{_AT_ANY}::test_a_save_whose_fsync_failed_begins_anew_instead_of_trusting_a_second_fsync",),
    ),
    # Order and names
    "a folder is written under its final name": (
        _LOCAL, "        staging = self._hidden_path(Hidden.tmp, name)\n", "        staging = final\n",
        (_SAVED_IN_ORDER,),
    ),
    "the manifest is sent before the files": (
        _FOLDERS, "        _run_in_parallel([partial(self._send,",
        '        self.client.put_new(f"{name}/{MANIFEST_FILE}", manifest)\n'
        "        _run_in_parallel([partial(self._send,",
        (_MIRRORS, _STORES),
    ),
    "ranks send the manifest when it is made": (
        _FOLDERS, "                self._manifest = (self.path / file).read_bytes()\n",
        "                self._manifest = (self.path / file).read_bytes()\n                self._put_manifest()\n",
        (_MACHINES,),
    ),
    "a removal deletes the files before the manifest": (
        _LOCAL, "                self.disk.rename(path / MANIFEST_FILE, path / removed_marker(self.run_id))\n",
        "                for file in self.disk.listdir(path):\n"
        "                    if file != MANIFEST_FILE:\n"
        "                        self.disk.unlink(path / file)\n"
        "                self.disk.rename(path / MANIFEST_FILE, path / removed_marker(self.run_id))\n",
        (_REMOVED_IN_ORDER,),
    ),
    "a removal in a store deletes the manifest last": (
        _FOLDERS, '        self.client.delete(f"{name}/{MANIFEST_FILE}")\n        self._delete_objects(name)\n',
        '        self._delete_objects(name)\n        self.client.delete(f"{name}/{MANIFEST_FILE}")\n', (_MACHINES,),
    ),
    "a removal in a store is not marked": (
        _FOLDERS, '        self.client.put(f"{name}/{self._markers[0]}", b"")\n', "", (_REMOVALS,),
    ),
    "a sweep of a store leaves no claim before it looks for a manifest": (
        _FOLDERS, "        self._put_claim(name)\n        if self._is_committed(name):\n",
        "        if self._is_committed(name):\n", (_STORES,),
    ),
    "a sweep of a store trusts its listing": (
        _FOLDERS, "        if self._is_committed(name):\n            self.client.delete",
        "        if False:\n            self.client.delete", (_STORES,),
    ),
    "a manifest is sent without a look at the claim": (
        _FOLDERS, "        self._check_claim(name, self._claim)\n        if not self.client.put_new(",
        "        if not self.client.put_new(", (_MIRRORS,),
    ),
    "a sender does not look at the claim after the manifest": (
        _FOLDERS, "        if claim not in (None, self._claim) or (may_be_changed", "        if (may_be_changed",
        (_STORES,),
    ),
    "two processes of a run share a claim": (
        _FOLDERS, "        self._claim = _Claim(run_id, attempt, secrets.token_hex(8))\n",
        '        self._claim = _Claim(run_id, attempt, "")\n', (_MIRRORS,),
    ),
    "a file that is sent late replaces one of a later attempt": (
        _FOLDERS, '        if not self.client.upload_new(f"{name}/{file}", path, check, on_part):\n',
        '        if self.client.put(f"{name}/{file}", path.read_bytes()):\n', (_MIRRORS, _MACHINES),
    ),
    "a file is sent without a look at its digest": (
        _FOLDERS, "        verify(source, manifest, [file])\n", "", (_MIRRORS,),
    ),
    "a manifest that is amended while its checkpoint is sent is not sent": (
        _MIRROR, "                    if self._queue.get(name) is waiting:\n", "                    if True:\n",
        (_MIRRORS,),
    ),
    "a copy that is abandoned goes on": (
        _MIRROR, "                if self._mirror.is_abandoned:\n", "                if False:\n", (_COPIES,),
    ),
    "a place that is full is tried for each checkpoint": (
        _MIRROR, "if is_of_place else {name: waiting}", "if False else {name: waiting}", (_COPIES,),
    ),
    "a checkpoint that cannot be read keeps others from their copies": (
        _MIRROR, " in _OF_PLACE and not is_of_source\n", " in _OF_PLACE\n", (_COPIES,),
    ),
    "a checkpoint that waits for its copy is not held over a restart": (
        "trainer_cli/callbacks/checkpointer.py",
        "        # Before any removal: it holds those that a killed attempt had not copied yet.\n",
        "        self.retention.retire(self._last_saved_step)\n", (_COPIES,),
    ),
    "a checkpoint of another run is replaced by a copy": (
        _MIRROR, "        is_of_run = there.run_id == own.run_id\n", "        is_of_run = True\n",
        (f"{_COPIES}::test_another_runs_checkpoint_is_not_replaced",),
    ),
    "the old one is deleted before it is replaced": (
        _LOCAL, "            old = self._swap(staging, name)\n",
        "            old = self._move_to_trash(name)\n            self.disk.rename(staging, final)\n", (_KILLS,),
    ),
    # Checks
    "digests are not compared": (
        _VERIFIED, '                if f"{self._entry.algorithm}:{self._digest.hexdigest()}" != self._entry.digest:\n',
        "                if False:\n", (_LOADS, _CATALOGS),
    ),
    "sizes are not compared when a file is read": (
        _VERIFIED, "        if self._source.size_bytes != self._entry.size_bytes:\n", "        if False:\n",
        (f"{_LOADS}::test_a_file_of_another_size_is_refused_before_it_is_read",),
    ),
    "sizes are not compared when checkpoints are listed": (
        _CATALOG, "        if sizes[file] != entry.size_bytes:\n", "        if False:\n", (_CATALOGS,),
    ),
    "missing files are not noticed when checkpoints are listed": (
        _CATALOG, "        if file not in sizes:\n            return manifest, f\"{file} is missing\"\n",
        "        if file not in sizes:\n            continue\n", (_CATALOGS,),
    ),
    "the digest of a manifest is not compared": (
        _MANIFEST, "    return data.endswith(end) and digest == _digest_of(data[: -len(end)])\n", "    return True\n",
        ("tests/core/test_manifest.py", _CATALOGS),
    ),
    "a resume does not verify": (
        _CATALOG, "            check(folder, entry.manifest)\n", "            pass\n", (_CATALOGS,),
    ),
    "weights that are not finite are resumed": (
        _CATALOG, "            if entry.manifest.finite:\n", "            if True:\n",
        ("tests/callbacks/test_checkpointer.py::test_weights_that_are_not_finite_are_saved_but_never_chosen_nor_counted",),
    ),
    "a damaged checkpoint in the way of a save counts as saved": (
        _SAVE, "                verify(folder, manifest)\n", "                pass\n",
        (f"{_CHECKPOINTER}::test_a_step_whose_bytes_were_altered_is_quarantined_and_written_again",),
    ),
    "another run's checkpoint counts as saved": (
        _SAVE, "    if metadata.run_id and (manifest.run_id, manifest.step) == (metadata.run_id, metadata.step):\n",
        "    if metadata.run_id:\n", (_CHECKPOINTER,),
    ),
    "a valid checkpoint of that name is replaced": (
        _LOCAL, "        if exists(self.disk, final / MANIFEST_FILE):\n            raise FileExistsError",
        "        if False:\n            raise FileExistsError", (_STORAGES,),
    ),
    "what is to be removed is not looked at again": (
        _RETENTION, "            if not self.catalog.look_again(deciding):\n", "            if True:\n",
        ("tests/callbacks/test_many_checkpoints.py", "tests/checkpoint/test_histories.py"),
    ),
    "a sweep takes other runs' folders": (
        _LOCAL, " and hidden.run_id == self.run_id", "", (_STORAGES,),
    ),
    # Ranks
    "another rank's failure does not stop the commit": (
        _GROUP,
        "        first_failure = _first_failure([failure for _, failure in reports])\n"
        "        if self.group.is_main:\n",
        "        first_failure = None\n        if self.group.is_main:\n", (_RANKS,),
    ),
    "rank 0 commits before the others have written": (
        _GROUP, "        reports = self.group.gather_on_main((own_report, _failure_of(error)))\n",
        "        reports = [(own_report, _failure_of(error))]\n", (_RANKS,),
    ),
    "a rank goes on before it is known whether the checkpoint exists": (
        _GROUP, "        self._raise_failure(self.group.broadcast(first_failure), error)\n",
        "        self._raise_failure(first_failure, error)\n", (_RANKS,),
    ),
    "holes between the parts of ranks are not noticed": (
        _GROUP, "        if problem is not None:\n            raise SaveError(f\"the ranks",
        "        if False:\n            raise SaveError(f\"the ranks", (_RANKS,),
    ),
    "a part that another rank found damaged is taken": (
        "trainer_cli/checkpoint/group_verify.py", "        verify(folder, manifest, unverified)\n", "        pass\n",
        ("tests/checkpoint/test_group_save.py",),
    ),
    # Locks
    "a run directory is not locked": (
        "trainer_cli/runs/run_lock.py",
        "            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "            return None\n",
        ("tests/runs/test_run_dir.py",),
    ),
    "a checkpoint that is read is removed": (
        _LOCKS, "    if not disk.lock(fd, exclusive=True):\n        return False\n    for", "    for", (_STORAGES,),
    ),
    "a reader takes no lock": (
        _LOCAL, "                locked = self.disk.lock(fd, exclusive=False)\n", "                locked = True\n",
        (_STORAGES,),
    ),
    "a reader keeps the lock of a manifest that was replaced": (
        _LOCAL,
        "                if not is_same_file(self.disk, fd, path / MANIFEST_FILE):\n", "                if False:\n",
        (_STORAGES,),
    ),
    # The copy
    "a save in the background writes the live tensors": (
        "trainer_cli/checkpoint/snapshot.py", "            return self.buffer.capture(layout, trained)\n",
        "            return Snapshot(layout, trained)\n",
        ("tests/checkpoint/test_snapshot_buffer.py", "tests/checkpoint/test_async_checkpointer.py"),
    ),
}  # fmt: skip
