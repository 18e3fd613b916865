"""Makes the checkpoints of this folder, with DeepSpeed and torch, each with what DeepSpeed itself says that it holds.

    DS_ACCELERATOR=cpu python tests/data/deepspeed/make.py [CASE ...]

A case's folder has the checkpoint as DeepSpeed saved it, without the scripts that it copies along; `expected.safetensors`,
the masters and moments that DeepSpeed's own functions gathered over the ranks, with the model's buffers and frozen
parameters; and `expected.json`, the losses of each step, before and after the save. Needs DeepSpeed's operator async_io for
the cases that offload to NVMe.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

BF16_ON_2 = {"world_size": 2, "precision": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "stage0-fp32-1": {"stage": 0, "world_size": 1},
    "stage0-fp32-groups-2": {"stage": 0, "world_size": 2, "groups": "two"},
    "stage0-bf16-2": {"stage": 0, "world_size": 2, "precision": "bf16"},
    "stage0-fp16-1": {"stage": 0, "world_size": 1, "precision": "fp16", "groups": "two"},
    "stage1-fp32-2": {"stage": 1, "world_size": 2, "accumulation": 3},
    "stage1-bf16-3": {"stage": 1, "world_size": 3, "precision": "bf16"},
    "stage2-bf16-groups-2": {"stage": 2, "world_size": 2, "precision": "bf16", "groups": "two"},
    "stage2-fp16-1": {"stage": 2, "world_size": 1, "precision": "fp16", "client": True},
    "stage2-fp32-3": {"stage": 2, "world_size": 3, "groups": "two", "zero": {"round_robin_gradients": True}},
    "stage2-cpu-2": {"stage": 2, **BF16_ON_2, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "stage3-bf16-1": {"stage": 3, "world_size": 1, "precision": "bf16"},
    "stage3-bf16-groups-2": {"stage": 3, **BF16_ON_2, "groups": "two", "zero": {"sub_group_size": 40}},
    "stage3-fp16-2": {"stage": 3, "world_size": 2, "precision": "fp16"},
    "stage3-fp32-3": {"stage": 3, "world_size": 3},
    "stage3-nvme-1": {"stage": 3, "world_size": 1, "precision": "bf16", "nvme": True},
    "stage3-nvme-groups-2": {"stage": 3, **BF16_ON_2, "nvme": True, "groups": "two", "zero": {"sub_group_size": 40}},
    "universal-stage1-2": {"stage": 1, "world_size": 2, "precision": "bf16", "universal": True},
    "universal-stage3-2": {"stage": 3, "world_size": 2, "precision": "bf16", "universal": True, "groups": "two"},
    "trainer": {"stage": 2, "world_size": 2, "precision": "bf16", "folder": "checkpoint-3"},
}


def config(case: dict[str, Any], nvme: str) -> dict[str, Any]:
    from tests.interop.deepspeed_model import ADAM, SCHEDULER, TRAIN_BATCH_SIZE

    zero: dict[str, Any] = {"stage": case["stage"], **case.get("zero", {})}
    if case["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 10
    if case.get("nvme"):
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": nvme, "buffer_count": 5}
    accumulation = case.get("accumulation", 1)
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": TRAIN_BATCH_SIZE // case["world_size"] // accumulation,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
        "scheduler": SCHEDULER,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1000,
    }
    precision = case.get("precision", "fp32")
    if precision == "bf16":
        made["bf16"] = {"enabled": True}
    if precision == "fp16":
        # At stage 0 DeepSpeed unscales by the scale of the next step, which must be the same then.
        window = 1000 if case["stage"] == 0 else 2
        made["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": window}
    return made


def client_state() -> dict[str, Any]:
    import numpy as np
    import torch

    return {
        "epoch": 2,
        "best": float("inf"),
        "tensor": torch.arange(6.0).reshape(2, 3),
        "numpy": {"state": np.arange(4, dtype=np.uint32), "scalar": np.float64(0.5)},
        "shape": torch.Size([2, 3]),
    }


def rank_main(name: str, work: Path) -> None:
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.swap_tensor import optimizer_utils
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    from tests.interop.deepspeed_model import STEPS_AFTER, STEPS_BEFORE, groups_of, make_tiny, micro_batches

    case = CASES[name]
    torch.set_num_threads(1)
    # An operator for shared memory, which would be compiled.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    rank, world_size = int(os.environ["RANK"]), case["world_size"]
    deepspeed.init_distributed("gloo")
    type(get_accelerator()).is_fp16_supported = lambda self: True
    swap_small_tensors(optimizer_utils.OptimizerSwapper)
    os.chdir(work)
    settings = config(case, "nvme")
    if case.get("nvme"):
        settings["aio"] = {"block_size": 1024, "intra_op_parallelism": 1}
    model = make_tiny()
    groups = groups_of(model, case.get("groups", "one"))
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=groups)
    accumulation = case.get("accumulation", 1)

    def step(number: int) -> float:
        losses = []
        for ids in micro_batches(number, rank, world_size, accumulation):
            loss = engine(ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
        total = torch.stack(losses).mean()
        torch.distributed.all_reduce(total)
        return float(total) / world_size

    losses = [step(number) for number in range(STEPS_BEFORE)]
    folder = work / case.get("folder", "")
    state = client_state() if case.get("client") else {}
    engine.save_checkpoint(str(folder), client_state=state)
    expected = gathered(engine, case["stage"])
    if case.get("zero", {}).get("round_robin_gradients"):
        # DeepSpeed's functions take the parameters in another order then than its own files have them; its tool does not.
        saved = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        expected = {name: value for name, value in expected.items() if not name.startswith("optimizer/")}
        expected |= {f"model/{name}": saved[name] for name, p in model.named_parameters() if p.requires_grad}
    losses += [step(number) for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)]
    if rank == 0:
        save_file(expected, work / "expected.safetensors")
        facts = {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "config": settings, "losses": losses}
        (work / "expected.json").write_text(json.dumps(facts | {"case": case}, indent=1, default=str) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def swap_small_tensors(swapper: Any) -> None:
    """Let tensors of a few bytes go to NVMe; else those of less than 1 MiB stay in memory.

    DeepSpeed cuts gradients at a drive's blocks, which are larger than these: its updates are not those of a run in memory
    then. What it saves is what it holds all the same.
    """
    begin = swapper.__init__

    def begin_small(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.min_aio_bytes = 64

    swapper.__init__ = begin_small


def of_stage0(engine: Any) -> dict[Any, dict[str, Any]]:
    """Return master and moments by parameter at stage 0 in 16 bits, of which DeepSpeed's functions know nothing."""
    from torch._utils import _unflatten_dense_tensors

    whole: dict[Any, dict[str, Any]] = {}
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_flat"):
        for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            state = optimizer.optimizer.state[flat]
            for slot, values in [("master", flat), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"])]:
                for one, value in zip(parameters, _unflatten_dense_tensors(values, parameters), strict=True):
                    whole.setdefault(one, {})[slot] = value.detach()
    elif hasattr(optimizer, "fp32_groups"):
        for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for one, master in zip(parameters, masters, strict=True):
                whole[one] = {"master": master.detach(), **optimizer.optimizer.state[master]}
    return whole


def gathered(engine: Any, stage: int) -> dict[str, Any]:
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed links the states after the step of the first parameter group, when the others have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    whole = of_stage0(engine) if stage == 0 else {}
    found: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            plain = stage == 0 and not (engine.fp16_enabled() or engine.bfloat16_enabled())
            if parameter in whole:
                values = whole[parameter]
            elif plain:
                values = {"master": parameter.detach(), **engine.optimizer.state[parameter]}
            else:
                values = {"master": safe_get_full_fp32_param(parameter)} | {
                    slot: safe_get_full_optimizer_state(parameter, slot) for slot in ("exp_avg", "exp_avg_sq")
                }
            found[f"model/{name}"] = values["master"].clone()
            for slot in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer/{slot}/{name}"] = values[slot].clone().reshape(found[f"model/{name}"].shape)
        elif stage == 3:
            with deepspeed.zero.GatheredParameters([parameter]):
                found[f"model/{name}"] = parameter.detach().clone()
        else:
            found[f"model/{name}"] = parameter.detach().clone()
    for name in ("shift", "numbers"):
        found[f"buffer/{name}"] = getattr(engine.module, name).clone()
    return {name: value.contiguous().cpu() for name, value in found.items()}


def make(name: str) -> None:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary) / name
        work.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, __file__, "--rank", name, str(work)]
        own = {"WORLD_SIZE": str(case["world_size"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(command, env=os.environ | own | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(case["world_size"])
        ]
        codes = [process.wait() for process in ranks]
        if any(codes):
            sys.exit(f"{name} failed")
        if case.get("universal"):
            make_universal(work)
        for path in list(work.rglob("zero_to_*.py")):
            path.unlink()
        shutil.rmtree(work / "nvme", ignore_errors=True)
        shutil.rmtree(HERE / name, ignore_errors=True)
        shutil.copytree(work, HERE / name)


def make_universal(work: Path) -> None:
    """Convert the checkpoint with DeepSpeed's own tool and keep the result alone."""
    tag = (work / "latest").read_text()
    tool = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(work / tag), "--output_folder", str(work / f"{tag}_universal")]
    subprocess.run([sys.executable, *tool, *folders], check=True)
    shutil.rmtree(work / tag)
    (work / "latest").unlink()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], Path(sys.argv[3]))
    else:
        for wanted in sys.argv[1:] or CASES:
            make(wanted)
