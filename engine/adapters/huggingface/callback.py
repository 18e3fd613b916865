"""Notes of a Trainer's run for its journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from zstore.engine.api.engine import Engine

_KNOWN = frozenset({"loss", "grad_norm", "learning_rate", "epoch", "step", "num_input_tokens_seen"})
"""Names of a Trainer's logs that each step of the journal has under its own."""


class RunCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the journal of `engine` the tokens of each step, if Trainer counts them."""

    def __init__(self, engine: Engine) -> None:
        self._journal = engine.journal
        self._log = engine.log
        self._seen_tokens = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the tokens counted so far."""
        self._seen_tokens = int(state.num_input_tokens_seen)

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say how many tokens the step has."""
        if args.include_num_input_tokens_seen not in (False, "no"):
            seen = int(state.num_input_tokens_seen)
            self._journal.note(tokens=seen - self._seen_tokens)
            self._seen_tokens = seen

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Mapping[str, Any], **kwargs: Any
    ) -> None:
        """Record what the Trainer logs and the journal lacks: evaluations, and metrics of the user's own."""
        self._log({name: value for name, value in logs.items() if name not in _KNOWN})
