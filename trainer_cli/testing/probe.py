"""One process of a resume check: the user's training, recorded; and the interpreter that forks such processes."""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import ExitStack
from importlib import import_module

from trainer_cli.errors import ExitCode, TrainError
from trainer_cli.testing.trace import Plan

ERROR = "train: error: "


def main(path: str) -> int:
    """Run the plan in a file, and return the exit code of the fit."""
    from trainer_cli.config.compose import from_yaml
    from trainer_cli.parallel.process_group import from_environment
    from trainer_cli.run.fit import fit

    plan = Plan.read(path)
    try:
        composed = from_yaml(
            # Samples that differ after a resume are what the check looks for.
            plan.config,
            ["resume_allow=[data]"],
            trusted=True,
            config_dir=plan.config_dir,
        )
        with ExitStack() as stack:
            if plan.calls is not None:
                from trainer_cli.testing.calls import recorded

                stack.enter_context(recorded(plan.calls, composed.project_root))
            if composed.config.parallel.strategy != "fsdp":
                return fit(composed)
            # It needs a group, also for one process.
            group = from_environment({}, alone_too=True)
            stack.callback(group.close)
            return fit(composed, group=group)
    except TrainError as error:
        print(f"{ERROR}{error}", file=sys.stderr)
        return int(error.exit_code)
    except Exception:
        traceback.print_exc()
        return int(ExitCode.FAILED)


def serve() -> None:
    """Import everything, then fork a process for each line of JSON, and print its exit code.

    No thread may run and no tensor be computed here, so that the children can fork safely.
    """
    import torch._dynamo  # noqa: F401  the first optimizer imports it

    import trainer_cli.config.compose
    import trainer_cli.run.build
    import trainer_cli.run.fit
    import trainer_cli.testing.recorder  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        for module in asked["imports"]:
            import_module(module)
        child = os.fork()
        if child == 0:
            code = int(ExitCode.FAILED)
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                file = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, 1)
                os.dup2(file, 2)
                os.chdir(asked["cwd"])
                code = main(asked["plan"])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
