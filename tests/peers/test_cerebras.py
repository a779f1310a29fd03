"""The claims of the Trainer of Cerebras' ModelZoo, of its code and its tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from peer_claims import Claim, claims, each, try_claim

from trainer_cli import CheckpointerCallback
from trainer_cli.errors import ConfigError


def check_refused_interval(folder: Path, interval: object) -> None:
    with pytest.raises(ConfigError, match="save_interval"):
        CheckpointerCallback(folder / "checkpoints", save_interval=interval)


CLAIMS: list[Claim] = [
    *claims(
        "callbacks/checkpoint.py: Checkpoint(steps=)",
        check_refused_interval,
        {"-1 is refused": (-1,), "1.5 is refused": (1.5,)},
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
