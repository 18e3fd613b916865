"""Train a small model with Lightning on zstore: optimizer state on disk, at stage 3; started again, it goes on where it was.

python examples/lightning_fit.py                      # one rank
python examples/lightning_fit.py --devices 2          # Lightning starts the second
torchrun --nproc-per-node 2 examples/lightning_fit.py --devices 2
"""

import argparse
import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from zstore.lightning import ZstoreStrategy


class Regression(L.LightningModule):
    def configure_model(self):  # layers that are made here are sharded as they are made
        if not hasattr(self, "net"):
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "zstore-lightning")
args = parser.parse_args()
args.out.mkdir(parents=True, exist_ok=True)
config = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": str(args.out.absolute())},
    }
}
L.seed_everything(0)
inputs = torch.randn(256, 64)
data = TensorDataset(inputs, inputs[:, :8].tanh())
saves = ModelCheckpoint(args.out / "checkpoints", save_last=True)
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=args.devices,
    strategy=ZstoreStrategy(config),  # the one changed line
    callbacks=[saves],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Regression(), DataLoader(data, batch_size=8), ckpt_path="last")
print(f"rank {trainer.global_rank}: {trainer.global_step} steps, loss {trainer.callback_metrics.get('loss', 0):.3f}")
