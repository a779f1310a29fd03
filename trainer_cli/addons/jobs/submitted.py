"""Keep the source that a sweep trains, for jobs that start later and on other machines.

SWEEP/.jobs/source/DIGEST     the Python files and configs of the project, once for each digest
SWEEP/.jobs/submitted.json    which of them the last command has submitted
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer_cli.addons.jobs.run_jobs import job_file
from trainer_cli.config import given_value, project_root
from trainer_cli.errors import UserError
from trainer_cli.keys import SOURCE
from trainer_cli.origin import DamagedSourceError, KeptSource, keep_project, report_source
from trainer_cli.runs import RunDir, read_json, write_json


def keep_submitted(sweep: Path, overrides: Sequence[str], config_dir: Path | None) -> Path | None:
    """Keep the source of the project, and return where: the jobs are trained by it, whatever is edited meanwhile.

    With `source=run` it is that of the last command; None with `source=project`, which takes what each job finds.

    Raises:
        UserError: with `source=run`, if that is damaged, or was not kept by this user.
    """
    chosen, record = given_value(overrides, SOURCE), job_file(sweep, "submitted", "json")
    last = (read_json(record) or {}).get(SOURCE)
    if chosen == "project":
        return None
    try:
        before = None if last is None else KeptSource.read(RunDir(record.parent).source_folder / Path(last).name)
    except DamagedSourceError:
        if chosen == "run":
            raise
        before = None
    if chosen == "run" and before is not None:
        if not before.is_own:
            raise UserError(f"{before.folder} is not signed by this user's key, so it is not run", where=SOURCE)
        return before.folder
    root = project_root(config_dir, Path.cwd())
    kept = keep_project(record.parent, root, [(config_dir or Path("configs")).resolve()])
    if before is not None:
        report_source(str(sweep), before.find_differences(root), "; source=run goes on with that")
    if kept is not None:
        write_json(record, {SOURCE: kept.name})
    return kept
