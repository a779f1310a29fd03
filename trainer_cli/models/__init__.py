"""Models that ship: an MLP and a small convolutional network, both classifiers.

They show what a model of this program is: a `torch.nn.Module` whose forward takes a batch, here (inputs, labels), and
returns a mapping with `loss`, and in evaluation the metric `accuracy`. They know nothing of the trainer. Configs name
them by their public names, `trainer_cli.MLP` and `trainer_cli.CNN`. Begin with `mlp.py`.
"""

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.models.cnn import CNN as CNN
    from trainer_cli.models.mlp import MLP as MLP

    __all__: list[str]
else:
    add_lazy_names(globals(), {"cnn": "CNN", "mlp": "MLP"})
