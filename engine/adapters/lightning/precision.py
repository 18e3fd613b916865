"""Lightning's precision plugin: backward and step of the engine, and the type of inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from zstore.errors import UsageError

from .settings import PRECISIONS

_KNOWN = ("Precision", "MixedPrecision", "HalfPrecision")


class EnginePrecision:
    """A mixin in front of Lightning's `Precision`: the strategy's engine runs backward and step, clips and scales.

    Parameters and inputs are of one type, and masters fp32, whether Lightning says "mixed" or "true".
    """

    precision: Any
    _after_closure: Callable[[Any, Any], None]

    def __init__(self, name: str) -> None:
        self.precision = name
        self.dtype = torch.float32
        """Type of parameters and inputs."""
        self.clip_norm = 0.0
        """Norm that the engine clips to; 0.0: no clipping."""

    @classmethod
    def in_place_of(cls, plugin: Any) -> EnginePrecision:
        """Return this plugin in place of Lightning's choice. Raises UsageError for an unsupported type."""
        if isinstance(plugin, cls):
            return plugin
        if type(plugin).__name__ not in _KNOWN or plugin.precision not in PRECISIONS:
            raise UsageError(
                f"precision {plugin.precision!r} ({type(plugin).__name__}) has no place in the engine: choose "
                f"{', '.join(PRECISIONS)}"
            )
        return cls(plugin.precision)

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the module as it is: `initialize` casts it."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Return the batch with its floating tensors in the type that the model computes in."""
        return apply_to_collection(data, torch.Tensor, self._cast) if self.dtype != torch.float32 else data

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run the engine's backward."""
        others = [str(name) for name in kwargs if name != "retain_graph"]
        if args or others:
            raise UsageError(f"backward() takes retain_graph alone, got {', '.join(others) or 'more arguments'}")
        model.trainer.strategy.engine_backward(tensor, retain_graph=bool(kwargs.get("retain_graph")))

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure and the hooks before the step, and then the engine's step."""
        if kwargs:
            raise UsageError(f"optimizer.step() takes a closure alone, got {', '.join(kwargs)}")
        result = closure()
        self._after_closure(model, optimizer)
        model.trainer.strategy.engine_step()
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Leave clipping to the engine. Raises UsageError for another norm than the engine's."""
        algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
        if clip_val and (float(clip_val) != self.clip_norm or algorithm != "norm"):
            # Lightning refuses Trainer(gradient_clip_val=) beside manual optimization.
            raise UsageError(
                f"clip_gradients({clip_val}, {algorithm!r}): the engine clips within its step, to a norm of "
                f'{self.clip_norm}: write "gradient_clipping": {clip_val} into the config of ZstoreStrategy, which then clips '
                'each step of the optimizer, and this call does nothing; algorithm "norm" is the only one'
            )
