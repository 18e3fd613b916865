"""Scripts of DeepSpeed's examples, as they are but for their data, under `python -m zstore.as_deepspeed`."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from tests.integrations.tokens import texts
from tests.peers.suites import SOURCES

FETCH = """DeepSpeed's examples are not there:
git clone --depth 1 https://github.com/microsoft/DeepSpeedExamples tests/peers/sources/DeepSpeedExamples"""
EXAMPLES = SOURCES / "DeepSpeedExamples"
LINES = list(texts(60, 30)["text"])
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
IMAGES = """
import torch
from types import SimpleNamespace as transforms
transforms = transforms(Compose=lambda steps: None, ToTensor=lambda: None, Normalize=lambda mean, std: None)
class CIFAR10(torch.utils.data.Dataset):
    def __init__(self, root, train, download, transform):
        generator = torch.Generator().manual_seed(int(train))
        self.labels = torch.randint(0, 10, (640 if train else 64,), generator=generator).tolist()
        self.images = 0.3 * torch.randn(len(self.labels), 3, 32, 32, generator=generator)
        for image, label in zip(self.images, self.labels):
            image[:, 3 * label : 3 * label + 3] += 1
    def __len__(self):
        return len(self.labels)
    def __getitem__(self, index):
        return self.images[index], self.labels[index]
datasets = type("datasets", (), {"CIFAR10": CIFAR10})
"""
TEXTS = f"""
import runpy, sys
import datasets
datasets.load_dataset = lambda *args, **kwargs: datasets.Dataset.from_dict({{"text": {LINES!r}}})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800), pytest.mark.skipif(not EXAMPLES.is_dir(), reason=FETCH)]


def _run(folder: Path, *words: Any, world_size: int = 1, path: Path | None = None) -> str:
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {} if path is None else {"PYTHONPATH": str(path)}
    command = [sys.executable, "-m", "zstore", "run", "--nproc", world_size, "--as-deepspeed", *words]
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _tokenizer(folder: Path) -> None:
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(LINES, vocab_size=320, special_tokens=list(SPECIAL.values()))
    folder.mkdir()
    made.save_model(str(folder))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, cls_token="<s>", sep_token="</s>", **SPECIAL)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "GPT2Tokenizer"}))


@pytest.mark.parametrize(("kind", "stage", "world_size"), [("fp32", 0, 1), ("fp16", 2, 1), ("bf16", 3, 2)])
def test_cifar10_learns(kind: str, stage: int, world_size: int, tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text(IMAGES)
    words = ["cifar10_deepspeed.py", "--epochs", 8 * world_size, "--dtype", kind, "--stage", stage]
    said = _run(EXAMPLES / "training" / "cifar", *words, world_size=world_size, path=tmp_path)
    assert "Finished Training" in said
    found = re.search(r"Accuracy of the network on the 64 test images:\s+(\d+) %", said)
    assert int(found[1]) > 90


def test_hello_deepspeed_trains_and_goes_on(tmp_path: Path) -> None:
    for name in ("fire", "loguru", "pytz", "sh"):
        if importlib.util.find_spec(name) is None:
            pytest.skip("HelloDeepSpeed needs: pip install fire loguru pytz sh==1.14.2")
    _tokenizer(tmp_path / "tokenizer")
    runner = tmp_path / "runner.py"
    runner.write_text(TEXTS)
    script = ["--no-local-rank", runner, "train_bert_ds.py"]
    sizes = ["--num_layers", 1, "--num_heads", 2, "--ff_dim", 16, "--h_dim", 16, "--max_seq_length", 32]
    folder = EXAMPLES / "training" / "HelloDeepSpeed"
    there = ["--checkpoint_dir", tmp_path / "runs", "--tokenizer", tmp_path / "tokenizer"]
    _run(folder, *script, *there, *sizes, "--num_iterations", 8, "--checkpoint_every", 5)
    (made,) = (tmp_path / "runs").iterdir()
    said = _run(folder, *script, "--load_checkpoint_dir", made, "--num_iterations", 12)
    assert f"Saved model to {made}" in said
    assert (made / "zero_to_fp32.py").is_file()
    steps = {int(path.name.removeprefix("global_step")) for path in made.glob("global_step*")}
    assert 7 in steps
    assert max(steps) > 7


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (1, ["--zero_stage", 0]),
        (2, ["--zero_stage", 3]),
        (1, ["--zero_stage", 3, "--offload", "--lora_dim", 4, "--only_optimize_lora", "--gradient_checkpointing"]),
    ],
)
def test_step_1_of_deepspeed_chat_trains_and_saves(world_size: int, words: list[Any], tmp_path: Path) -> None:
    chat, folder = EXAMPLES / "applications" / "DeepSpeed-Chat", tmp_path / "opt"
    _tokenizer(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    OPTForCausalLM(OPTConfig(vocab_size=320, max_position_embeddings=128, **sizes, **ids)).save_pretrained(folder)
    data = chat / "data"
    data.mkdir(exist_ok=True)
    rows = [{"prompt": f"Human: {line[:20]} Assistant:", "chosen": line[20:80], "rejected": "a"} for line in LINES]
    (data / "train.json").write_text(json.dumps(rows))
    (data / "eval.json").write_text(json.dumps(rows[:16]))
    said = _run(
        chat / "training" / "step1_supervised_finetuning",
        *("main.py", "--data_path", "local/jsonfile", "--data_split", "1,0,0"),
        *("--data_output_path", tmp_path / "index"),
        *("--model_name_or_path", folder, "--per_device_train_batch_size", 4, "--per_device_eval_batch_size", 4),
        *("--max_seq_len", 32, "--num_train_epochs", 2, "--dtype", "bf16", "--output_dir", tmp_path / "out", *words),
        world_size=world_size,
        path=chat,
    )
    perplexities = [float(one) for one in re.findall(r"ppl: ([\d.]+)", said)]
    assert perplexities[-1] < perplexities[0]
    state = torch.load(tmp_path / "out" / "pytorch_model.bin")
    model = OPTForCausalLM.from_pretrained(folder)
    expected = {name: value.shape for name, value in model.state_dict().items() if name in state}
    assert len(expected) == len(state) > 30
    assert {name: value.shape for name, value in state.items()} == expected
    assert all(bool(torch.isfinite(value).all()) for value in state.values())
