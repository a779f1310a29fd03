"""Models that ship: an MLP and a small convolutional network, both classifiers.

They show what a model of this program is: a `torch.nn.Module` whose forward takes a batch, here (inputs, labels), and
returns a mapping with `loss`, and in evaluation the metric `accuracy`. They know nothing of the trainer. Configs name
them by their public names, `trainer_cli.MLP` and `trainer_cli.CNN`. Begin with `mlp.py`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
