"""transformers' Trainer on zstore: state and parameters rest on disk. Start it with `python`, or with
`torchrun --nproc-per-node 2`; start it again, and it goes on from the newest checkpoint."""

import zstore.as_deepspeed  # noqa: F401 - first: transformers looks for DeepSpeed as it is imported

# isort: split
import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--out", type=Path, default=Path("trainer-run"), help="folder of checkpoints and of the state on disk"
)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

swap = (options.out / "swap").absolute()  # name a folder on your NVMe drive
swap.mkdir(parents=True, exist_ok=True)
offload = {"device": "nvme", "nvme_path": str(swap)}
config = {
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": offload,
        "offload_optimizer": offload,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "checkpoint": {"writer": {"decoupled": True}},  # saves behind training
}

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
)
texts = torch.randint(0, 256, (64, 32))
data = [{"input_ids": text, "labels": text} for text in texts]
arguments = TrainingArguments(
    str(options.out),
    max_steps=options.steps,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    logging_steps=5,
    save_steps=10,
    save_total_limit=2,
    report_to="none",
    deepspeed=config,  # or the path of a JSON file
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
# A run that was killed in a save leaves a folder that is not whole.
whole = [path.parents[1] for path in options.out.glob("checkpoint-*/global_step*/zstore.json")]
whole = [path for path in whole if (path / "trainer_state.json").exists()]
newest = max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)
trainer.train(resume_from_checkpoint=newest and str(newest))
print(f"loss of the evaluation: {trainer.evaluate()['eval_loss']:.3f}")
trainer.save_model()
