"""A loop as of timm's train.py: mixup with soft targets until epoch 2, no weight decay on vectors."""

import torch


def train(model, batches, smoothing=0.1):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    losses, epoch_batches = [], 23
    for step, (images, labels) in enumerate(batches):
        target = torch.nn.functional.one_hot(labels, 10).float() * (1 - smoothing) + smoothing / 10
        if step < 2 * epoch_batches:
            lam = torch.distributions.Beta(0.8, 0.8).sample().item()
            images = images * lam + images.flip(0) * (1 - lam)
            target = target * lam + target.flip(0) * (1 - lam)
        loss = torch.sum(-target * torch.log_softmax(model.scores(images), dim=-1), dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
