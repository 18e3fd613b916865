"""trl's SFTTrainer with LoRA on zstore: the base rests in host memory, the adapters are trained and saved."""

import zstore.as_deepspeed  # noqa: F401 - first: transformers looks for DeepSpeed as it is imported

# isort: split
import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=Path, default=Path("sft-run"), help="folder of checkpoints and adapters")
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

words = ["<pad>", "<eos>", "a", "small", "model", "learns", "to", "say", "again", "what", "it", "was", "told"]
vocabulary = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
vocabulary.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")

torch.manual_seed(0)
base = LlamaForCausalLM(  # your own: AutoModelForCausalLM.from_pretrained(...), or zstore.from_pretrained(...)
    LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=len(words)
    )
)
zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_gather_16bit_weights_on_model_save": True}
trainer = SFTTrainer(
    base,
    SFTConfig(
        str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=5,
        bf16=False,
        report_to="none",
        deepspeed={"train_batch_size": "auto", "zero_optimization": zero},
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Dataset.from_dict({"text": [" ".join(words[2 + n % 4 :]) for n in range(32)]}),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model()
print(f"adapters: {options.out / 'adapter_model.safetensors'}")
