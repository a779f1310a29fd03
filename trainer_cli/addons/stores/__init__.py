"""Checkpoints elsewhere: object stores, web servers, and copies of a run's checkpoints in a second folder.

A checkpoint in a store exists if its manifest does, and the manifest is sent last and deleted first, as on a disk.

- `ObjectStorage` is a storage like that of a disk. A save is committed on the local disk, and a thread sends it; until
  it is sent its local copy stays. While the store is unreachable, training and saving continue.
- Several machines send their own files (`rank_folder.py`); rank 0 claims the name first and sends the manifest last.
- A load reads a local copy with the same manifest, or downloads one; every file is compared with its digest.
- Requests are repeated a bounded number of times. A listing is never trusted where it matters.
- `Copier` copies every k-th committed checkpoint into a second folder, behind the training, and holds it meanwhile.

Begin with `object_store.py`, then `object_client.py`, the only module that uses fsspec.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.addons.stores.copier import Copier as Copier
    from trainer_cli.addons.stores.copies import check_copies as check_copies
    from trainer_cli.addons.stores.copies import reachable as reachable
    from trainer_cli.addons.stores.download import cache_of as cache_of
    from trainer_cli.addons.stores.download import configure_downloads as configure_downloads
    from trainer_cli.addons.stores.download import fetch as fetch
    from trainer_cli.addons.stores.download import is_cached as is_cached
    from trainer_cli.addons.stores.download import write_copy as write_copy
    from trainer_cli.addons.stores.object_client import ObjectClient as ObjectClient
    from trainer_cli.addons.stores.object_store import ObjectStorage as ObjectStorage

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "copier": "Copier",
            "copies": "check_copies reachable",
            "download": "cache_of configure_downloads fetch is_cached write_copy",
            "object_client": "ObjectClient",
            "object_store": "ObjectStorage",
        },
    )
