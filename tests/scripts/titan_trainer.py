"""torchtitan's own Trainer on a CPU, by hand: it saves through torchtitan's manager and through zstore's.

    python tests/scripts/titan_trainer.py FOLDER [CASE ...]

Each run is `torchtitan.train.main()` under torchrun, with a config of `titan_configs.py` and torchtitan's options, over
text and a tokenizer made on the spot. Beside torchtitan itself it needs triton (`pip install triton`), which
torchtitan's Trainer imports; no GPU.

torchtitan takes a machine without an accelerator for one with CUDA, so its table of the device is replaced by one of the
CPU before its other modules are imported. torch has no backward pass of FlexAttention for a CPU, and CUDA graphs are
CUDA's: the config has torchtitan's `ScaledDotProductAttention`, and no graphs. torchtitan 0.3.0 calls
`torch.distributed.set_timeout`, which torch 2.13 has under a private name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 10


def work(arguments: list[str]) -> None:
    """Be one rank of torchtitan's program."""
    from torchtitan.tools import utils

    cpu = types.ModuleType("cpu")
    for name in ("set_device", "synchronize", "device_count"):
        setattr(cpu, name, getattr(torch.cpu, name))
    for name in ("reset_peak_memory_stats", "empty_cache"):
        setattr(cpu, name, lambda: None)
    vars(cpu).update(
        current_device=lambda: 0,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: types.SimpleNamespace(total_memory=1 << 30),
        memory_stats=lambda device: {},
    )
    utils.device_type, utils.device_module = "cpu", cpu
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout
    from torchtitan.train import main

    sys.argv = [sys.argv[0], "--module", "titan_configs", *arguments]
    main()


def make_assets(folder: Path) -> None:
    """Write a tokenizer and a data set of 2000 texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "</s>", "<unk>", *(f"w{number}" for number in range(500))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (folder / "assets").mkdir(parents=True)
    tokenizer.save(str(folder / "assets/tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": False}
    (folder / "assets/tokenizer_config.json").write_text(json.dumps(special))
    (folder / "text").mkdir()
    draw = random.Random(0)
    with open(folder / "text/train.jsonl", "w") as file:
        for _ in range(2000):
            text = " ".join(draw.choices(words[3:], k=draw.randrange(20, 300)))
            file.write(json.dumps({"text": text}) + "\n")


Record = dict[int, list[list[str]]]


class Runs:
    """Runs of the Trainer in one folder, each of `STEPS` steps that saves at every fifth."""

    def __init__(self, out: Path) -> None:
        self.out = out
        make_assets(out)

    def run(self, config: str, folder: str, *options: str, ranks: int = 1, kill: int = 0) -> Record:
        """Train, and return of each step what each rank recorded: the loss, and a digest of its state."""
        for old in self.out.glob("record.*"):
            old.unlink()
        environment = os.environ | {
            "TITAN_RECORD": str(self.out / "record"),
            "TITAN_KILL": str(kill),
            "HF_HOME": str(self.out / "home"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        command += ["--train", "--config", config, "--dump_folder", str(self.out / folder)]
        command += ["--hf_assets_path", str(self.out / "assets"), "--dataloader.dataset_path", str(self.out / "text")]
        command += ["--training.steps", str(STEPS), *options]
        with open(self.out / "log", "a") as log:
            log.write(f"\n{' '.join(command)}\n")
            log.flush()
            code = subprocess.run(command, check=False, env=environment, stdout=log, stderr=log).returncode
        if (code != 0) != bool(kill):
            raise RuntimeError(f"a run ended with {code}; {self.out}/log says why")
        found: Record = {}
        for rank in range(ranks):
            for line in (self.out / f"record.{rank}").read_text().splitlines():
                step, *what = json.loads(line)
                found.setdefault(step, []).append(what)
        return found

    def copy(self, folder: str, to: str, save: str = "step-5") -> str:
        """Copy one save of a run as all that another run has, and return `to`."""
        shutil.copytree(self.out / folder / "checkpoint" / save, self.out / to / "checkpoint" / save)
        return to


def expect(what: str, found: Record, expected: Record, first: int = 1) -> None:
    """Compare the steps from `first` on, bit for bit."""
    expected = {step: value for step, value in expected.items() if step >= first}
    if found != expected:
        different = sorted(step for step in found.keys() | expected.keys() if found.get(step) != expected.get(step))
        raise RuntimeError(f"{what}: steps {different} differ")
    losses = [round(float.fromhex(found[step][0][0]), 5) for step in (min(found), max(found))]
    print(f"{what}: steps {min(found)} to {max(found)} equal, losses {losses[0]} to {losses[1]}", flush=True)


def modes(runs: Runs) -> None:
    """Each mode trains to the bits of torchtitan's manager, and so again from step 5 on when it resumes."""
    for ranks in (1, 2):
        whole = runs.run("torchtitans", f"own{ranks}", ranks=ranks)
        again = runs.run("torchtitans", runs.copy(f"own{ranks}", f"own{ranks}-again"), ranks=ranks)
        expect(f"torchtitan's, on {ranks}, resumed", again, whole, 6)
        moved = runs.run("zstores", runs.copy(f"own{ranks}", f"moved{ranks}"), ranks=ranks)
        expect(f"torchtitan's, on {ranks}, resumed by zstore's", moved, whole, 6)
        for mode in ("disabled", "async", "async_with_pinned_mem"):
            folder, option = f"{mode}{ranks}", ("--checkpoint.async_mode", mode)
            expect(f"zstore's, on {ranks}, {mode}", runs.run("zstores", folder, *option, ranks=ranks), whole)
            again = runs.run("zstores", folder, *option, "--checkpoint.load_step", "5", ranks=ranks)
            expect(f"zstore's, on {ranks}, {mode}, resumed", again, whole, 6)


def killed(runs: Runs) -> None:
    """A run that is killed at step 8 goes on by the same command."""
    option = ("--checkpoint.async_mode", "async", "--checkpoint.num_threads", "2")
    whole = runs.run("zstores", "unkilled", *option, ranks=2)
    runs.run("zstores", "killed", *option, ranks=2, kill=8)
    expect("zstore's, on 2, killed at 8", runs.run("zstores", "killed", *option, ranks=2), whole, 6)


def other_ranks(runs: Runs) -> None:
    """What one rank saved is loaded by two, and the other way round: to the bits of torchtitan's manager.

    torchtitan refuses the state of its data loader at another number of data-parallel ranks, so data begins anew; two
    ranks of tensor parallelism read the data of one.
    """
    anew = ("--checkpoint.exclude_from_loading", "dataloader")
    tensor = ("--parallelism.tensor_parallel_degree", "2")
    for title, first, then in (
        ("1 -> 2 ranks", (1,), (2, *anew)),
        ("2 -> 1 ranks", (2,), (1, *anew)),
        ("1 -> 2 ranks of tensor parallelism", (1,), (2, *tensor)),
        ("2 ranks of tensor parallelism -> 1", (2, *tensor), (1,)),
    ):
        found = []
        for config in ("torchtitans", "zstores"):
            folder = f"{config} {title}".replace(" ", "-").replace(">", "")
            runs.run(config, folder, *first[1:], ranks=first[0])
            found.append(runs.run(config, runs.copy(folder, f"{folder}-then"), *then[1:], ranks=then[0]))
        expect(f"zstore's, {title}", found[1], found[0])


def hugging_face(runs: Runs) -> None:
    """The last save is Hugging Face's, and another run begins with it."""
    found = []
    for config in ("torchtitans", "zstores"):
        last = ("--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only")
        runs.run(config, f"{config}-hf", *last, ranks=2)
        saved = str(runs.out / f"{config}-hf/checkpoint/step-{STEPS}")
        begin = ("--checkpoint.initial_load_path", saved, "--checkpoint.initial_load_in_hf")
        found.append(runs.run(config, f"{config}-from-hf", *begin, ranks=2))
    expect("zstore's, begun with Hugging Face's weights", found[1], found[0])


CASES: dict[str, Callable[[Runs], None]] = {case.__name__: case for case in (modes, killed, other_ranks, hugging_face)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        work(sys.argv[2:])
    elif importlib.util.find_spec("triton") is None:
        sys.exit("torchtitan's Trainer imports triton, which is not here: pip install triton")
    else:
        runs_of_all = Runs(Path(sys.argv[1]))
        for case in sys.argv[2:] or CASES:
            CASES[case](runs_of_all)
