"""The loop of sthalles/SimCLR, whose loss puts the score of the other view first."""

import torch
from torch.nn.functional import cosine_similarity, cross_entropy


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    losses = []
    for one, other in batches:
        features = model.network(torch.cat([one, other]))
        similarity = cosine_similarity(features.unsqueeze(1), features.unsqueeze(0), dim=-1)
        size = len(features)
        pairs = torch.cat([torch.arange(len(one))] * 2)
        same = pairs.unsqueeze(0) == pairs.unsqueeze(1)
        itself = torch.eye(size, dtype=torch.bool)
        positive = similarity[same & ~itself].view(size, 1)
        negative = similarity[~same].view(size, -1)
        scores = torch.cat([positive, negative], dim=1) / 0.5
        loss = cross_entropy(scores, torch.zeros(size, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses
