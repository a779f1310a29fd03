"""What this distribution adds. `train --help` imports this module, which therefore imports no torch."""

from __future__ import annotations

from trainer_cli.addon import AddOn, Verb

ADDON = AddOn(
    verbs={"rises": Verb("loss_rises.rises", "list the steps at which the loss rose most", after="tail")},
    names={"loss_rises.stop": "StopAtRise"},
    # A run whose config names the callback is resumed and evaluated without trust=.
    components=("loss_rises.stop",),
)
