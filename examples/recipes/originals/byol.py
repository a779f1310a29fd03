"""A loop as of lucidrains/byol-pytorch: step, then move the teacher."""

import torch
from torch.nn.functional import normalize


def train(model, batches):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    losses = []
    for one, other in batches:
        with torch.no_grad():
            targets = model.teacher(one), model.teacher(other)
        loss = 0
        for view, target in ((one, targets[1]), (other, targets[0])):
            x, y = normalize(model.predictor(model.student(view)), dim=-1), normalize(target, dim=-1)
            loss = loss + 2 - 2 * (x * y).sum(dim=-1)
        loss = loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                slow.copy_(slow * 0.99 + fast * 0.01)
        losses.append(loss.item())
    return losses
