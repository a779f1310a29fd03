from trainer_cli.models.cnn import CNN as CNN
from trainer_cli.models.mlp import MLP as MLP
