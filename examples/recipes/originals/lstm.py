"""The loop of pytorch/examples/word_language_model, with hidden states that are handed on."""

import torch
from torch.nn.functional import cross_entropy


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    hidden = (torch.zeros(2, 16, 64), torch.zeros(2, 16, 64))
    losses = []
    for tokens, following in batches:
        hidden = tuple(state.detach() for state in hidden)
        optimizer.zero_grad()
        output, hidden = model.lstm(model.embedding(tokens), hidden)
        loss = cross_entropy(model.head(output).view(-1, 128), following.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        losses.append(loss.item())
    model.hidden = torch.stack(hidden).detach()
    return losses
