"""A decoder-only transformer of torch's own layers."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Transformer(nn.Module):
    """Predicts the next token at each place of up to `context` tokens."""

    def __init__(self, vocabulary: int, context: int, layers: int = 2, heads: int = 4, width: int = 96) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def scores(self, tokens: Tensor) -> Tensor:
        """(N, T) tokens -> (N, T, vocabulary) scores of each next token."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        return self.head(self.layers(x, mask=mask, is_causal=True))

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor | int]:
        """The loss of a batch; `tokens` counts for intervals such as 2e5tok."""
        tokens, following = batch
        loss = cross_entropy(self.scores(tokens).flatten(0, 1), following.flatten())
        return {"loss": loss, "tokens": tokens.numel()}

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """(1, T) tokens, continued by `count`."""
        for _ in range(count):
            scores = self.scores(tokens[:, -self.context :])[:, -1]
            following = torch.multinomial((scores / 0.7).softmax(dim=-1), 1)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens
