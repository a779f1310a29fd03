"""The loop of pytorch/examples: losses are summed over the batch, and divided by its size."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits


def train(model, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for images, _ in batches:
        optimizer.zero_grad()
        logits, mean, log_variance = model.reconstruct(images)
        reconstruction = binary_cross_entropy_with_logits(logits, images.view(-1, 64), reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        loss = (reconstruction + divergence) / len(images)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
