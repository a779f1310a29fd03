from trainer_cli.commands.check import Check as Check
from trainer_cli.commands.ckpt import Action as Action
from trainer_cli.commands.command_line import (
    Parser as Parser,
    add_allow_pickle as add_allow_pickle,
    add_config_arguments as add_config_arguments,
    add_config_dir as add_config_dir,
    add_job_limits as add_job_limits,
    add_no_replay as add_no_replay,
    add_overrides as add_overrides,
    main as main,
)
from trainer_cli.commands.streams import tolerate_lost_output as tolerate_lost_output
from trainer_cli.commands.tail import no_run as no_run
