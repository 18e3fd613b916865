"""A loop of Accelerate on zstore. Start it with `python`, `accelerate launch` or `torchrun --nproc-per-node 2`."""

import zstore.as_deepspeed  # noqa: F401 - first: accelerate looks for DeepSpeed as it is imported

# isort: split
import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=Path, default=Path("accelerate-run"), help="folder of the state and the weights")
parser.add_argument("--epochs", type=int, default=2)
options = parser.parse_args()

config = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
PartialState(cpu=not torch.cuda.is_available())  # several ranks on CPUs
plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=2)
accelerator = Accelerator(deepspeed_plugin=plugin)

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
texts = torch.randint(0, 256, (64, 32))
loader = DataLoader([{"input_ids": text, "labels": text} for text in texts], batch_size=4, shuffle=True)
schedule = get_cosine_schedule_with_warmup(optimizer, 2, options.epochs * len(loader) // 2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

state = options.out / "state"
if (state / "latest").exists():  # a save that did not end has none
    accelerator.load_state(str(state))
for epoch in range(options.epochs):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {accelerator.gather(loss.detach()).mean():.3f}")
accelerator.save_state(str(state))
accelerator.save_model(model, options.out / "weights")
accelerator.end_training()
