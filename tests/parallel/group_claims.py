"""What two ranks say of their group; each writes its answers to FOLDER/RANK.json."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainer_cli.errors import UserError
from trainer_cli.parallel.process_group import from_environment
from trainer_cli.parallel.rendezvous import is_of_peer


def _fails(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _refuse() -> None:
    raise UserError("no such file", where="here")


def main(folder: Path) -> None:
    group = from_environment(os.environ, timeout_s=60)
    later = torch.tensor([group.rank, 10.0])
    wait = group.start_sum(later)
    assert wait is not None
    wait.wait()
    ran: list[int] = []
    shared: list[float] = []

    def lead() -> None:
        ran.append(10 + group.run_on_all(follower.add, 1.0))

    class Follower:
        def add(self, number: float) -> int:
            shared.append(group.sum(torch.tensor([number])).item())
            return len(shared)

    follower = Follower()

    def decide() -> str:
        ran.append(group.rank)
        return "step500"

    group.lead(lead, follower)
    answers = {
        "rank": [group.rank, group.world_size, group.local_rank, group.is_main],
        "broadcast": group.broadcast({"run": f"of rank {group.rank}", "path": [1, None]}),
        "gather": group.gather(f"rank {group.rank}"),
        "sum": group.sum(torch.tensor([1.0, float(group.rank)])).tolist(),
        "later": later.tolist(),
        "on_main": group.on_main(decide),
        "ran": ran,
        "shared": shared,
        "checked": _fails(lambda: group.checked(lambda: 1 / (1 - group.rank), "setup")),
        "failed": _fails(lambda: group.on_main(_refuse)),
    }
    group.barrier()
    if group.is_main:
        # Rank 1 enters no further collective.
        group.set_timeout(0.5)
        error = _fails(group.barrier)
        answers["timed out"] = "Timed out" in error and is_of_peer(RuntimeError(error))
        answers["lost"] = str(group.lost_error("at step 17")).replace(socket.gethostname(), "HOST")
        answers["first"] = [group.claim_failure(ZeroDivisionError("its own")), group.claim_failure(ValueError("later"))]
        answers["failure_of_rank_0"] = str(group.lost_error("at step 18"))
    (folder / f"{group.rank}.json").write_text(json.dumps(answers))
    if not group.is_main:
        while not (folder / "0.json").exists():
            time.sleep(0.05)
    group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
