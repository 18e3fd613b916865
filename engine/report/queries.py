"""Methods of DeepSpeed's engine that scripts call on zstore's, and whose answers have another home here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _momentum(engine: Any) -> list[Any]:
    return [group.get("betas", group.get("momentum", 0.0)) for group in engine.training_state.optimizer.param_groups]


def _batch_info(engine: Any) -> tuple[int, int, int]:
    batch = engine.training_state.accumulation.batch
    return batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps


QUERIES: Mapping[str, Callable[..., Any]] = {
    # Samples of a step over all ranks, samples of a micro-batch, micro-batches of a step.
    "get_batch_info": _batch_info,
    # Of each parameter group its betas, or `momentum`; 0.0 if it has neither.
    "get_mom": _momentum,
    "zero_optimization": lambda engine: engine.training_state.config.stage > 0,
    "zero_optimization_stage": lambda engine: engine.training_state.config.zero.stage,
    "zero_optimization_partition_gradients": lambda engine: engine.training_state.config.stage >= 2,
    "zero_optimization_partition_weights": lambda engine: engine.training_state.config.stage >= 3,
    # The norm that gradients are clipped to; 0.0: they are not.
    "gradient_clipping": lambda engine: engine.training_state.clip_norm,
    "steps_per_print": lambda engine: engine.training_state.config.settings.steps_per_print,
    "dump_state": lambda engine: engine.training_state.config.settings.dump_state,
    "wall_clock_breakdown": lambda engine: engine.training_state.config.settings.wall_clock_breakdown,
    # `loss.backward()` scales a loss by itself.
    "scale": lambda _, loss: loss,
    "save_fp16_model": lambda engine, *args, **named: engine.save_16bit_model(*args, **named),
    "destroy": lambda engine: engine.close(),
}
"""Name -> the result of a call with the engine and the call's arguments."""
