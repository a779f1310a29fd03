"""A transformer from sentence to sentence, judged by BLEU (Papineni et al., 2002) of what it writes itself."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

WORDS, LENGTH, START = 20, 8, 0


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Sentences of LENGTH words, and their translations: each word + 1, in reverse."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        words = torch.randint(1, WORDS - 1, (LENGTH,), generator=generator)
        return words, (words + 1).flip(0)


class Data:
    def __init__(self, count: int = 3000) -> None:
        self.train, self.val = Sentences(0, count), Sentences(count, 200)


class Translator(nn.Module):
    """In evaluation it writes a translation too, for metrics of the whole set."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH + 1, width)
        sizes: dict = {"d_model": width, "nhead": 2, "dim_feedforward": 2 * width, "batch_first": True, "bias": False}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 1)
        self.head = nn.Linear(width, WORDS)

    def embed(self, words: Tensor) -> Tensor:
        return self.words(words) + self.places.weight[: words.shape[1]]

    def scores(self, source: Tensor, written: Tensor) -> Tensor:
        """Scores (N, T, WORDS) of the word after each of the `written` (N, T) ones."""
        mask = nn.Transformer.generate_square_subsequent_mask(written.shape[1], device=written.device)
        memory = self.encoder(self.embed(source))
        return self.head(self.decoder(self.embed(written), memory, tgt_mask=mask, tgt_is_causal=True))

    def forward(self, batch: list[Tensor]) -> dict[str, Tensor]:
        source, target = batch
        written = torch.cat([torch.full_like(target[:, :1], START), target[:, :-1]], dim=1)
        loss = cross_entropy(self.scores(source, written).flatten(0, 1), target.flatten(), label_smoothing=0.1)
        return {"loss": loss} if self.training else {"loss": loss, "written": self.write(source), "target": target}

    def write(self, source: Tensor) -> Tensor:
        """The likeliest word at each place, one after another."""
        written = torch.full_like(source[:, :1], START)
        for _ in range(LENGTH):
            written = torch.cat([written, self.scores(source, written)[:, -1:].argmax(dim=2)], dim=1)
        return written[:, 1:]
