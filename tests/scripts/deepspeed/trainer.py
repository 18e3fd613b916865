"""Trainer with `--deepspeed ds.json`: train, save, resume, evaluate."""

import argparse
import json
import os

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--evaluate_only", action="store_true")
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--best", action="store_true")
    args = parser.parse_args()

    training = TrainingArguments(
        args.out,
        deepspeed=args.deepspeed,
        use_cpu=args.deepspeed is None,
        num_train_epochs=2,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        save_steps=2,
        eval_strategy="steps" if args.best else "no",
        eval_steps=2,
        load_best_model_at_end=args.best,
        metric_for_best_model="loss" if args.best else None,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = AutoModelForCausalLM.from_pretrained(args.model)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (8,), generator=generator) for _ in range(14)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=model, args=training, train_dataset=data, eval_dataset=data[:4])
    rank = training.process_index
    if args.evaluate_only:
        print(f"rank {rank} after {trainer.evaluate()['eval_loss']!r}", flush=True)
        return
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    print(f"rank {rank} losses {json.dumps([losses, norms])}", flush=True)
    print(f"rank {rank} after {trainer.evaluate()['eval_loss']!r}", flush=True)
    trainer.save_model(os.path.join(args.out, "final"))
    if rank == 0:
        print(f"rank 0 saved {sorted(os.listdir(os.path.join(args.out, 'final')))}", flush=True)


if __name__ == "__main__":
    main()
