"""What the add-on `exact` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn, Verb

ADDON = AddOn(
    verbs={
        "replay": Verb(
            "trainer_cli.addons.exact.replay_command",
            "replay a step of a run, look into it and verify it",
            after="tail",
            loads_torch=True,
        ),
        "diverge": Verb(
            "trainer_cli.addons.exact.diverge_command",
            "find the first step where two runs differ, and what differs first",
            after="replay",
        ),
        "bisect": Verb(
            "trainer_cli.addons.exact.bisect_command",
            "find the first step of a run at which a condition holds",
            after="check",
        ),
        "data": Verb(
            "trainer_cli.addons.exact.data_command",
            "show which samples a step of a run used, or will use",
            after="bisect",
        ),
        "rerun": Verb(
            "trainer_cli.addons.exact.rerun_command",
            "make a whole run again from the source that it keeps, and compare all of it",
            after="data",
            loads_torch=True,
        ),
        "pack": Verb(
            "trainer_cli.addons.exact.pack_command",
            "write what makes a run again into one file",
            after="rerun",
            loads_torch=True,
        ),
    },
    parts={
        "check.checks": "trainer_cli.addons.exact.check_command:CHECKS",
        "checkpoint.replay_step": "trainer_cli.addons.exact.replay_process:replay_step",
        "hint.failed_step": "trainer_cli.addons.exact.replay_plan:describe_commands",
        "hint.failed_evaluation": "trainer_cli.addons.exact.replay_plan:describe_evaluation",
        "replay.earliest_start": "trainer_cli.addons.exact.replay_plan:earliest_start",
    },
    components=("trainer_cli.addons.exact.recorder",),
    names={
        "trainer_cli.addons.exact.resume": "assert_resume_is_exact",
    },
)
