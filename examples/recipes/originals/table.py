"""The usual loop of a notebook: weighted loss, one cycle of the rate."""

import torch
from torch.nn import BCEWithLogitsLoss


def train(model, batches):
    criterion = BCEWithLogitsLoss(pos_weight=torch.tensor([5.0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=400)
    losses = []
    for numbers, categories, labels in batches:
        optimizer.zero_grad()
        loss = criterion(model.scores(numbers, categories), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses
