"""A loop of Accelerate whose way of training `accelerate launch` chooses."""

import torch
from accelerate import Accelerator


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for batch in loader:
        loss = net(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(accelerator.distributed_type.value, loss.item())


if __name__ == "__main__":
    main()
