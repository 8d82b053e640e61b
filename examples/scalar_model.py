import torch

import parallelkit as pk

group = pk.init()  # joins torchrun's ranks; without torchrun, a group of one
linear = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(linear.weight)  # y = w·x with w = 1
model = pk.DataParallel(linear, group)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# Rank 0 has one example, rank 1 three: mean gradients -2 and +2.
x, y, examples = [(1.0, 3.0, 1), (2.0, 1.0, 3)][group.rank]
x, y = torch.full((examples, 1), x), torch.full((examples, 1), y)
loss = 0.5 * (model(x) - y).square().mean()
model.backward(loss, weight=examples)  # gradient (1·(-2) + 3·2) / 4 = 1
optimizer.step()
print(f"rank {group.rank}: w = {linear.weight.item():.1f}")
