"""Lets DeepSpeed itself load universal folders and train on from them; run by a Python that has it, one process a rank.

    DS_ACCELERATOR=cpu RANK=0 WORLD_SIZE=1 ... python tests/interop/deepspeed_goes_on.py CASES OUT

`CASES` is a JSON list of {"root", "tag", "stage", "precision", "groups", "fp16", "steps"}. `OUT` is a folder: rank 0 writes
`<number>.pt` with the masters and moments that DeepSpeed's own functions give after the load, and `losses.json`
with what else was found: the losses of the steps after it, the client's state, counters, learning rates, loss scales.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


def config(case: dict[str, Any], world_size: int) -> dict[str, Any]:
    from tests.interop.deepspeed_model import ADAM, SCHEDULER, TRAIN_BATCH_SIZE

    zero: dict[str, Any] = {"stage": case["stage"]}
    if case["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 10
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": TRAIN_BATCH_SIZE // world_size,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
        "scheduler": SCHEDULER,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": True},
        "steps_per_print": 1000,
    }
    if case["precision"] == "bf16":
        made["bf16"] = {"enabled": True}
    if case["precision"] == "fp16":
        made["fp16"] = {"enabled": True, **case["fp16"]}
    return made


def go_on(case: dict[str, Any], state_file: Path) -> dict[str, Any]:
    import deepspeed
    import torch

    from tests.data.deepspeed.make import gathered
    from tests.interop.deepspeed_model import groups_of, make_tiny, micro_batches

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = make_tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)  # nothing of what is loaded may be there before
    engine, *_ = deepspeed.initialize(
        model=model, config=config(case, world_size), model_parameters=groups_of(model, case["groups"])
    )
    path, client = engine.load_checkpoint(case["root"], tag=case["tag"])
    state = gathered(engine, case["stage"])
    if rank == 0:
        torch.save(state, state_file)
    found = {
        "path": path,
        "client": {key: client[key].tolist() if hasattr(client[key], "tolist") else client[key] for key in ("a", "t")},
        "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps],
        "lr": engine.get_lr(),
        "losses": [],
        "scales": [],
    }
    for number in range(engine.global_steps, engine.global_steps + case["steps"]):
        (ids,) = micro_batches(number, rank, world_size)
        found["scales"].append(float(getattr(engine.optimizer, "cur_scale", 1.0)))
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        torch.distributed.all_reduce(total)
        found["losses"].append(float(total) / world_size)
    engine.destroy()
    return found


def main(cases: list[dict[str, Any]], out: Path) -> None:
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    torch.set_num_threads(1)
    # An operator for shared memory, which would be compiled.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    type(get_accelerator()).is_fp16_supported = lambda self: True
    found = [go_on(case, out / f"{number}.pt") for number, case in enumerate(cases)]
    if os.environ["RANK"] == "0":
        (out / "losses.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
