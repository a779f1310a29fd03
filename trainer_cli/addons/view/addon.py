"""What the add-on `view` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn, Verb

ADDON = AddOn(
    verbs={
        "serve": Verb(
            "trainer_cli.addons.view.serve",
            "show all runs below a folder in a browser, live: table and curves",
            after="tail",
        ),
        "report": Verb(
            "trainer_cli.addons.view.report",
            "write runs into one HTML file: curves, checkpoints, config, sweeps",
            after="serve",
        ),
    },
    parts={"fit.at_end": "trainer_cli.addons.view.report_at_end:report_at_end"},
)
