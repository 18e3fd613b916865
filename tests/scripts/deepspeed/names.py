"""What a process sees of DeepSpeed: names that are there, names that are not, a version; and what its children see."""

import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import subprocess
import sys


def version_in_child(results):
    assert importlib.util.find_spec("deepspeed") is not None
    results.put(importlib.metadata.version("deepspeed"))


def main():
    import deepspeed
    import deepspeed.runtime.lr_schedules

    import zstore.as_deepspeed
    from zstore.engine.adapters.deepspeed.names import MODULES

    importlib.reload(zstore.as_deepspeed)  # a second time
    for dotted, homes in MODULES.items():
        module = importlib.import_module(dotted)
        for name in (name for names in homes.values() for name in names):
            assert getattr(module, name, module) is not module, f"{dotted}.{name}"
            assert name in dir(module)
    print("version", deepspeed.__version__)
    assert importlib.metadata.version("deepspeed") == deepspeed.__version__
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert "deepspeed" in importlib.metadata.packages_distributions()
    assert importlib.util.find_spec("deepspeed") is not None
    assert "WarmupLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    assert deepspeed.ops.adam.FusedAdam is deepspeed.ops.adam.fused_adam.FusedAdam
    assert not hasattr(deepspeed, "init_inference")
    assert not hasattr(deepspeed, "__file__")

    for line in (
        "deepspeed.moe.layer.MoE()",
        "from deepspeed.pipe import PipelineModule; PipelineModule([])",
        "from deepspeed import init_inference",
        "from deepspeed.ops.adam import ZenFlowCPUAdam",
        "from deepspeed.nowhere import nothing",
        "deepspeed.zero.TiledLinearReturnBias",
        "deepspeed.accelerator.get_accelerator().nothing",
    ):
        try:
            exec(line)
        except (ImportError, AttributeError, RuntimeError) as error:
            print(f"missing {line} -> {type(error).__name__}: {error}")

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=version_in_child, args=(results,))
    child.start()
    print("spawned", results.get())
    child.join()
    # With an option, so that it is a new Python wherever this script runs.
    code = "import importlib.util as u, sys; print(u.find_spec('deepspeed'), getattr(sys, 'own', None))"
    there = {"env": dict(os.environ)}
    elsewhere = {"env": {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}}
    for name, how in (("started", there), ("elsewhere", elsewhere)):
        done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=True, **how)
        print(name, done.stdout.strip())


if __name__ == "__main__":
    main()
