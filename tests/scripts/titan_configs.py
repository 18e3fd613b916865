"""Configs for `titan_trainer.py`: torchtitan's `llama3_debugmodel`, small and for a CPU, with either manager."""

import hashlib
import json
import os
import signal
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.llama3.parallelize import parallelize_llama

import zstore.torchtitan


class Recorder(MetricsProcessor):
    """Writes of each step the loss, and a digest of this rank's weights and optimizer state after it."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, global_avg_loss: float, *rest: Any, **others: Any) -> None:
        super().log(step, global_avg_loss, *rest, **others)
        state = dict(self.optimizers.state_dict())
        for part in self.model_parts:
            state.update(part.state_dict())
        found = hashlib.sha256()
        for name in sorted(state):
            value = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
            found.update(name.encode())
            if isinstance(value, torch.Tensor):
                found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                found.update(repr(value).encode())
        with open(f"{os.environ['TITAN_RECORD']}.{os.environ['RANK']}", "a") as file:
            file.write(json.dumps([step, global_avg_loss.hex(), found.hexdigest()]) + "\n")
        if step == int(os.environ.get("TITAN_KILL", "0")):
            os.kill(os.getpid(), signal.SIGKILL)


def parallelize(model: Any, **parts: Any) -> Any:
    """Shard the model as torchtitan does, its gradients by sums alone: gloo has no others."""
    model = parallelize_llama(model, **parts)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def torchtitans() -> Any:
    """Return the config with torchtitan's checkpoint manager."""
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        # torch's FlexAttention has no backward pass on a CPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec.parallelize_fn = parallelize
    # torch 2.13's FSDP2 does not know the default, "spmd_types".
    config.parallelism.spmd_backend = "partial_dtensor"
    config.metrics = Recorder.Config(log_freq=1)
    config.training.disable_cuda_graphs = True
    config.training.seq_len, config.training.local_batch_size = 128, 4
    config.validator.enable = False
    config.debug.seed = 1
    config.checkpoint.enable, config.checkpoint.interval = True, 5
    return config


def zstores() -> Any:
    """Return the same config with zstore's."""
    config = torchtitans()
    config.checkpoint = zstore.torchtitan.CheckpointManager.Config(enable=True, interval=5, last_save_model_only=False)
    return config
