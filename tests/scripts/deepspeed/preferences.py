"""DPO or GRPO with `--deepspeed ds.json`: a reference model beside the one that is trained, and generation."""

import argparse

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def make_tokenizer():
    words = [*(f"w{i}" for i in range(61)), "<unk>", "<pad>", "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return made


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--grpo", action="store_true")
    args = parser.parse_args()
    settings = {
        "output_dir": args.out,
        "deepspeed": args.deepspeed,
        "use_cpu": args.deepspeed is None,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "bf16": False,
    }
    tokenizer = make_tokenizer()
    if args.grpo:
        from trl import GRPOConfig, GRPOTrainer

        trainer = GRPOTrainer(
            model=args.model,
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=GRPOConfig(num_generations=2, max_completion_length=6, beta=0.1, **settings),
            train_dataset=Dataset.from_list([{"prompt": f"w{i} w1"} for i in range(8)]),
            processing_class=tokenizer,
        )
    else:
        from trl import DPOConfig, DPOTrainer

        rows = [{"prompt": f"w{i} w1", "chosen": f" w{i} w2 w3", "rejected": f" w4 w{i}"} for i in range(8)]
        trainer = DPOTrainer(
            model=args.model,
            args=DPOConfig(**settings),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"rank {trainer.accelerator.process_index} losses {losses}", flush=True)


if __name__ == "__main__":
    main()
