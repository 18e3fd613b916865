"""Ray Train that saves to a bucket, and goes on with as many workers as there are: python examples/ray_train.py URL"""

import argparse
import json
import pathlib
import tempfile

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer

import zstore
from zstore.engine import Engine

CONFIG = {
    "train_batch_size": 8,  # of a step, whatever the number of workers
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
}


def train(settings: dict) -> None:
    """Train on one worker of Ray; all of them call this."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    rows = torch.utils.data.TensorDataset(torch.randn(1000, 16))
    engine, _, loader, _ = zstore.initialize(model=model, config=CONFIG, training_data=rows)
    with engine:
        # The newest checkpoint, by however many workers it was saved; the data goes on at its position.
        engine.load_checkpoint(settings["url"])
        while engine.global_steps < settings["steps"]:
            for (batch,) in loader:
                loss = (engine(batch) - batch.sum(1, keepdim=True)).square().mean()
                engine.backward(loss)
                if engine.is_gradient_accumulation_boundary():
                    engine.step()
                    break
                engine.step()
            url = engine.save_checkpoint(settings["url"]).wait().url
            report(url, engine, loss.item())


def report(url: str, engine: Engine, loss: float) -> None:
    """Tell Ray of a checkpoint (all workers): it is in the bucket already, so Ray's checkpoint only says where."""
    metrics = {"step": engine.global_steps, "workers": engine.world_size, "loss": loss, "version": url}
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "version.json").write_text(json.dumps(metrics))
        pointer = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=pointer if engine.global_rank == 0 else None)


def trainer(url: str, steps: int, storage: str | None = None) -> TorchTrainer:
    """Return a trainer of one to four workers, as many as there are nodes for."""
    return TorchTrainer(
        train,
        train_loop_config={"url": url, "steps": steps},
        torch_config=TorchConfig(backend="nccl" if torch.cuda.is_available() else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 4), elastic_resize_monitor_interval_s=30),
        run_config=ray.train.RunConfig(storage_path=storage, failure_config=ray.train.FailureConfig(max_failures=-1)),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the run, as s3://bucket/run")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    print(trainer(options.url, options.steps).fit().metrics)
