"""Names that scripts written for DeepSpeed ask the engine for, beside those that the engine has of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zstore.errors import UsageError

if TYPE_CHECKING:
    from .report.monitors import Monitors
    from .training import Training


class DeepSpeedNames:
    """What the run's config says and how far it is, under DeepSpeed's names."""

    training_state: Training
    monitor: Monitors
    """Takes a script's own values: `if engine.monitor.enabled: engine.monitor.write_events([(name, value, sample)])`."""

    @property
    def global_samples(self) -> int:
        """Samples of all optimizer steps so far, over all ranks."""
        return self.training_state.samples

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (samples of a step over all ranks, samples of a micro-batch, micro-batches of a step)."""
        batch = self.training_state.batch
        return batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps

    def get_mom(self) -> list[Any]:
        """Return the momentum of each parameter group: its betas, or `momentum`; 0.0 where it has neither."""
        groups = self.training_state.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def zero_optimization(self) -> bool:
        """Return whether anything is sharded or may be: a stage above 0."""
        return self.training_state.config.stage > 0

    def zero_optimization_stage(self) -> int:
        """Return the stage, 0 to 3."""
        return self.training_state.config.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded: stages 2 and 3."""
        return self.training_state.config.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are sharded: stage 3."""
        return self.training_state.config.stage >= 3

    def gradient_clipping(self) -> float:
        """Return the norm that gradients are clipped to; 0.0: they are not."""
        return self.training_state.config.gradient_clipping

    def steps_per_print(self) -> int:
        """Return the steps from one line of progress to the next; 0: none."""
        return self.training_state.config.settings.steps_per_print

    def dump_state(self) -> bool:
        """Return whether the state was printed at the start, as the config asks."""
        return self.training_state.config.settings.dump_state

    def wall_clock_breakdown(self) -> bool:
        """Return whether the times of forward, backward and step are printed."""
        return self.training_state.config.settings.wall_clock_breakdown

    def destroy(self) -> None:
        """Do as `close()`."""
        engine: Any = self
        engine.close()

    def compile(self, backend: Any = "inductor", compile_kwargs: Any = None, **options: Any) -> None:
        """Compile the model's forward with torch, as `model.compile(backend=backend, **compile_kwargs)` does.

        Raises UsageError where parameters are sharded, for they come and go within the forward.
        """
        if self.training_state.hooks is not None:
            raise UsageError(
                "engine.compile(): parameters come and go within the forward, which cannot be traced: leave it out, or use a "
                "stage below 3 without offload_param"
            )
        self.training_state.model.compile(backend=backend, **(compile_kwargs or {}), **options)
