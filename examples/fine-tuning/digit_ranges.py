"""Handwritten digits of a range, as a data object."""

from torch.utils.data import Dataset, Subset

from trainer_cli import Digits


def only(dataset: Dataset, first: int, count: int | None = None) -> Subset:
    """The first `count` samples (None: all) whose labels are `first` to `first` + 4."""
    wanted = [index for index in range(len(dataset)) if first <= int(dataset[index][1]) < first + 5]
    return Subset(dataset, wanted[:count])


class DigitRange:
    """What `data` of the config makes: images (1, 8, 8) and labels of five digits from `first` on."""

    def __init__(self, first: int, count: int | None = None) -> None:
        digits = Digits(val_fraction=0.3)
        self.train, self.val = only(digits.train, first, count), only(digits.val, first)
