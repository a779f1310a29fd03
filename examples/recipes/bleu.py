"""BLEU (Papineni et al., 2002) over a whole evaluation."""

import math
from collections import Counter

from torch import Tensor


def grams_of(words: list[int], length: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(words[start : start + length]) for start in range(len(words) - length + 1))


class Bleu:
    """The geometric mean of the precisions of 1 to 4 words. No text is penalized as short: all have one length."""

    def __init__(self, longest: int = 4) -> None:
        self.longest = longest
        self.reset()

    def reset(self) -> None:
        self.found, self.written = [0] * self.longest, [0] * self.longest

    def update(self, written: Tensor, references: Tensor) -> None:
        """Both (N, length) numbers of words."""
        for text, reference in zip(written.tolist(), references.tolist(), strict=True):
            for length in range(1, self.longest + 1):
                grams = grams_of(text, length)
                self.found[length - 1] += (grams & grams_of(reference, length)).total()
                self.written[length - 1] += grams.total()

    def compute(self) -> float:
        if not all(self.found):
            return 0.0
        logarithms = (math.log(found / of) for found, of in zip(self.found, self.written, strict=True))
        return math.exp(sum(logarithms) / self.longest)
