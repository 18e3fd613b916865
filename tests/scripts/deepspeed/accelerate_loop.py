"""A loop of accelerate's, with its DeepSpeedPlugin or without: save, go on, load, go on again."""

import argparse
import json
import os

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    plugin = None
    if args.deepspeed:
        plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed, gradient_accumulation_steps=2, gradient_clipping=1.0)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2, cpu=plugin is None)

    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (8,), generator=generator) for _ in range(16)]
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=2), scheduler
    )

    def epoch():
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return [*losses, *scheduler.get_last_lr()]

    first = epoch()
    accelerator.save_state(os.path.join(args.out, "state"))
    second = epoch()
    accelerator.load_state(os.path.join(args.out, "state"))
    again = epoch()
    print(f"rank {accelerator.process_index} losses {json.dumps([first, second, again])}", flush=True)
    accelerator.unwrap_model(model).save_pretrained(
        os.path.join(args.out, "final"),
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )


if __name__ == "__main__":
    main()
