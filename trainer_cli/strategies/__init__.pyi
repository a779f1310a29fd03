from trainer_cli.strategies.blocks import find_blocks as find_blocks, recompute as recompute
from trainer_cli.strategies.fsdp import FSDP as FSDP
from trainer_cli.strategies.strategy import DDP as DDP, Single as Single, Strategy as Strategy
