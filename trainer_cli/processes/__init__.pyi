from trainer_cli.processes.child import (
    FrozenJob as FrozenJob,
    own_command as own_command,
    stop_with_parent as stop_with_parent,
)
from trainer_cli.processes.ends import FitEnd as FitEnd
from trainer_cli.processes.fit import (
    compose_fit as compose_fit,
    fit_in_processes as fit_in_processes,
    provide_fork as provide_fork,
)
from trainer_cli.processes.override_text import text_of as text_of
from trainer_cli.processes.rank import run_as_rank as run_as_rank
