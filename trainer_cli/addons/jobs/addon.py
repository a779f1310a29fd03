"""What the add-on `jobs` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn, Verb

ADDON = AddOn(
    verbs={
        "_job": Verb("trainer_cli.addons.jobs.job"),
        "_store": Verb("trainer_cli.addons.jobs.store"),
    },
    parts={
        "fit.in_children": "trainer_cli.addons.jobs.supervise:fit_in_children",
        "fit.sweep": "trainer_cli.addons.jobs.sweep:run_sweep",
        "jobs.run": "trainer_cli.addons.jobs.run_jobs:run_jobs",
        "plan.sweep": "trainer_cli.addons.jobs.sweep:plan_jobs",
        "process.launch_ranks": "trainer_cli.addons.jobs.launch:launch_ranks",
        "process.serve_forks": "trainer_cli.addons.jobs.fork_server:serve_forks",
    },
)
