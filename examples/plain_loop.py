"""A plain PyTorch loop whose optimizer state rests on disk: python examples/plain_loop.py [--out FOLDER]"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

from zstore.optim import Offloaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the state and the checkpoint; a temporary one by default")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        train(options.out or Path(temporary), options.steps)


def train(out: Path, steps: int) -> None:
    """Learn a random linear map."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 16))
    target = torch.randn(64, 16)
    # The one line that is another than torch.optim.AdamW(model.parameters(), lr=1e-2).
    with Offloaded(torch.optim.AdamW, model.parameters(), lr=1e-2, path=out) as optimizer:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in range(steps):
            x = torch.randn(32, 64)
            loss = nn.functional.mse_loss(model(x), x @ target)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 10 == 0 or step == steps - 1:
                print(f"step {step}: loss {loss.item():.4f}")
        # Loads into torch.optim.AdamW too.
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out / "checkpoint.pt")
        print(f"{optimizer.statistics().disk_bytes} bytes of optimizer state on disk")


if __name__ == "__main__":
    main()
