"""The usual loop: a warm-up of the rate, clipped gradients, and a copy of the model that follows slowly."""

import copy

import torch
from torch.nn.functional import mse_loss


def train(model, batches):
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20))
    losses = []
    for images, _ in batches:
        x = images.view(len(images), -1) * 2 - 1
        t = torch.randint(100, (len(x),))
        noise = torch.randn_like(x)
        kept = model.kept[t].unsqueeze(1)
        loss = mse_loss(model.noise_in(kept.sqrt() * x + (1 - kept).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
        losses.append(loss.item())
    return losses
