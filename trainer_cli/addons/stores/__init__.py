"""Checkpoints elsewhere: object stores, web servers, and copies of a run's checkpoints in a second folder.

Checkpoints are local; everything else is a mirror. A `Mirror` has a thread that makes a second place equal to a
storage, one checkpoint after another, and sends again what failed. In each place a checkpoint exists if its manifest
does, and the manifest is sent last and deleted first.

- `ObjectStorage` (`checkpoint.folder=s3://…`) is a storage like that of a disk: a save is committed on the local disk,
  and a mirror sends each; until it is sent its local copy stays. While the store is unreachable, training goes on.
- `Copies` (`checkpoint.copy_to`) has every k-th sent to a folder or a store, and holds it meanwhile.
- Several machines send their own files; rank 0 claims the name first and sends the manifest last (`RankFolder`).
- No object of a checkpoint is replaced but its manifest. A claim names the process that sends or removes a folder, so
  that a later attempt finds what was left, and an earlier one that still lives changes nothing.
- A load reads a local copy with the same manifest, or downloads one; every file is compared with its digest.
- Requests are repeated a bounded number of times. A listing is never trusted where it matters.

Begin with `mirror.py`, then `object_folders.py`; `object_client.py` is the only module that uses fsspec.
"""
