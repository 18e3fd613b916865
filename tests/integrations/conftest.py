"""Other people's training loops: Trainer, Accelerate, Lightning, torchtitan, FSDP2, scripts for DeepSpeed."""

from zstore.testing import ranks

# What the ranks of these tests import: seconds in each of them.
ranks.PRELOADED += ["transformers.trainer", "trl.trainer.sft_trainer", "peft", "lightning.pytorch", "zstore.torchtitan"]
