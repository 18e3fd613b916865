"""Activations off the device: the bits of a run that keeps them, whoever checkpoints the blocks, and nothing left behind."""

import errno
import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.bits import Case, Model, Run, engine_digests
from tests.engine.deep import BLOCKS, INPUT_BYTES, SAMPLES, WIDTH, Deep, data, deep
from tests.engine.fake_device import FakeDevice
from tests.engine.runs import make_config, start, state_of
from tests.engine.transformers_models import checkpoint_layers
from tests.waiting import until
from zstore import checkpointing
from zstore.engine import Engine
from zstore.engine.activations.checkpointing import _ProcessSettings, checkpoint_blocks
from zstore.errors import BudgetError, ConfigError, DiskFullError, StorageError, UsageError
from zstore.io.memory import PAGE_BYTES
from zstore.testing.faults import Fault, FaultyFiles, GatedFiles

KINDS = ("plain", "torch", "reentrant", "zstore")


def config(stage: int = 0, **own: Any) -> dict[str, Any]:
    return make_config(stage, zstore={"journal": False} | own, train_micro_batch_size_per_gpu=SAMPLES)


def offloaded(engine: Engine) -> Any:
    return engine.statistics().activations


def loss_of(model: Any, number: int) -> torch.Tensor:
    """Of what an engine writes the backward waits for the first: what is not written yet is used as it is."""
    torch.manual_seed(number)  # of dropout
    loss: torch.Tensor = model(data(number))
    found = model.statistics().activations if isinstance(model, Engine) and model.training else None
    if found and (found.tier == "disk" or not model.training_state.state.transfers.streams.device_is_host):
        until(lambda: offloaded(model).written_bytes, "nothing was written")
    return loss


def model_of(kind: str = "plain") -> Model:
    return Model(partial(Deep, kind), lambda step, micro, _: 2 * step + micro, loss_of)


def case_of(stage: int = 0, tier: str = "none", mode: str = "none", **own: Any) -> Case:
    return Case(stage, tier, "bf16", 2, 0.0, parameters=tier, overlap=mode, own={"journal": False} | own)


def bits(engine: Engine, steps: int = 2) -> dict[str, Any]:
    for number in range(2 * steps):
        engine.backward(loss_of(engine, number))
        engine.step()
    return state_of(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_on_disk_they_keep_the_bits(kind: str, tmp_path: Path) -> None:
    case = case_of(activations="disk", activations_path=str(tmp_path))
    with Run(case, 0, 1, model=model_of(kind)) as run:
        assert run.step() + run.step() + run.differences() == []
        found, links = offloaded(run.engine), run.engine.statistics().links
        forwards = 4
        if kind == "plain":
            # Parts of one tensor travel once: of each block x, the projection, and what comes after.
            assert found.kept_bytes > 8 * BLOCKS * INPUT_BYTES * forwards
        else:
            # The embedding's input, and the input of each block. The reentrant kind saves after the block has run: that of
            # the last one, which the backward needs at once, stays.
            inputs = BLOCKS - (kind == "reentrant")
            assert found.kept_bytes == (1 + inputs) * INPUT_BYTES * forwards
        assert found.tier == "disk"
        assert 0 < found.written_bytes <= found.kept_bytes
        assert found.read_bytes <= found.written_bytes
        # Checksums and padding come to it.
        assert links["activation_write"].bytes >= found.written_bytes
        assert links["activation_read"].bytes >= found.read_bytes
        assert found.resting_bytes == 0
        assert found.resting_peak_bytes <= found.kept_bytes // forwards
        assert any(tmp_path.rglob("activation*.shard"))
    assert not any(tmp_path.rglob("*.shard"))


def test_with_everything_on_disk_and_the_switch() -> None:
    case = case_of(3, "nvme", "backward", activations="disk", gradient_checkpointing=True)
    with Run(case, 0, 1, model=model_of()) as run:
        assert run.step() + run.step() + run.differences() == []
        assert offloaded(run.engine).kept_bytes == (1 + BLOCKS) * INPUT_BYTES * 4
        pools = run.engine.statistics().store.pool_bytes
        assert pools == run.engine.training_state.plan.held["buffers"].host
        assert pools % PAGE_BYTES == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_that_are_computed_again_keep_their_bits_on_disk(tmp_path: Path) -> None:
    found = []
    for own in ({}, {"activations": "disk", "activations_path": str(tmp_path)}):
        with start(config(3, gradient_checkpointing=True, **own), deep()) as engine:
            engine.compile(backend="aot_eager")
            found.append(bits(engine, steps=1))
    with start(config(3, activations="disk", activations_path=str(tmp_path)), deep()) as engine:
        engine.compile(backend="aot_eager")
        found.append(bits(engine, steps=1))
        assert offloaded(engine).written_bytes > 0
    assert found[0] == found[1] == found[2]
    assert not any(tmp_path.rglob("*.shard"))


def test_the_switch_alone_keeps_inputs_and_bits() -> None:
    kept = []
    for own in ({}, {"gradient_checkpointing": True}):
        with Run(case_of(**own), 0, 1, model=model_of()) as run:
            sizes: list[int] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.nbytes) or t, lambda t: t):
                run.engine(data(0))
            kept.append(sum(sizes))
            assert run.step() + run.step() + run.differences() == []
    assert kept[1] < kept[0] / 4
    model: Any = nn.Linear(2, 2)
    model.supports_gradient_checkpointing = True  # and has no method for it
    with pytest.raises(UsageError, match="no blocks"):
        start(config(gradient_checkpointing=True), model)
    asked: list[Any] = []
    model.gradient_checkpointing_enable = lambda **keywords: asked.append(keywords)
    checkpoint_blocks(model)
    assert asked == [{"gradient_checkpointing_kwargs": {"use_reentrant": False}}]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_from_a_device_of_its_own_memory(tier: str, tmp_path: Path) -> None:
    case = case_of(activations=tier, **({"activations_path": str(tmp_path)} if tier == "disk" else {}))
    with FakeDevice() as device:
        with Run(case, 0, 1, model=model_of("torch"), _streams=device) as run:
            assert run.step() + run.step() + run.differences() == []
            found, moved = offloaded(run.engine), run.engine.statistics().links
        assert device.num_under_way == 0
    assert found.tier == tier
    assert moved["device_to_host"].bytes == found.written_bytes > 0
    assert moved["host_to_device"].bytes == found.read_bytes


def test_host_memory_counts_against_the_budget() -> None:
    plain = config()
    plain["activation_checkpointing"] = {"cpu_checkpointing": True}
    with FakeDevice() as device, start(plain, deep("torch"), _streams=device) as engine:
        budget = engine.training_state.state.store.budget
        before = budget.used_bytes
        loss = engine(data(0))
        assert budget.used_bytes == before + (1 + BLOCKS) * INPUT_BYTES
        engine.backward(loss)
        assert offloaded(engine).resting_bytes == 0
        assert budget.used_bytes == before
    limited = config(activations="host", host_budget_bytes=1 << 20)
    with (
        FakeDevice() as device,
        start(limited, deep(), _streams=device) as engine,
        pytest.raises(BudgetError, match='activations to "disk"'),
    ):
        engine(data(0))


def test_a_graph_that_is_kept_has_another_backward(tmp_path: Path) -> None:
    found = []
    for own in ({}, {"activations": "disk", "activations_path": str(tmp_path)}):
        with start(config(**own), deep("torch")) as engine:
            torch.manual_seed(0)
            loss = engine(data(0))
            if own:
                until(lambda: offloaded(engine).written_bytes, "nothing was written")
            engine.backward(loss, retain_graph=True)
            if own:
                assert offloaded(engine).resting_bytes > 0
            engine.backward(loss)
            engine.step()
            found.append(bits(engine, 1))
            if own:
                assert offloaded(engine).resting_bytes == 0
    assert found[0] == found[1]


def test_errors_leave_nothing_behind(tmp_path: Path) -> None:
    files = FaultyFiles()
    case = case_of(activations="disk", activations_path=str(tmp_path))
    with Run(case, 0, 1, model=model_of("torch"), _files=files) as run:
        engine = run.engine
        handle = engine.module.blocks[1].register_forward_hook(lambda m, a, out: out.register_hook(_raise) and None)
        with pytest.raises(ValueError, match="on purpose"):
            run.step()
        handle.remove()
        # No room for another array; then a write that fails, of which the next call tells.
        files.inject(Fault(kind="allocate", error_number=errno.ENOSPC, times=1))
        with pytest.raises(DiskFullError):
            engine(data(0)[:8])
        files.heal()
        files.inject(Fault(kind="write", error_number=errno.EIO, times=1))
        files.paths.clear()
        losses: list[Any] = []  # held, since nothing is written for a loss that is gone

        def forward() -> None:
            losses.append(engine(data(0)))
            until(lambda: any(kind == "write" for kind, _ in files.paths), "nothing was written")

        with pytest.raises(StorageError) as raised:
            until(forward, "no call told of the failure")
        losses.clear()
        assert any("activation" in note for note in raised.value.__notes__)
        files.heal()
        del raised
        complete_or_warn(engine)
        engine.training_state.accumulation.restart()
        engine.training_state.gradients.drop()
        engine.training_state.counters.micro_steps = 0
        assert run.step() + run.step() + run.differences() == []
        loss = engine(data(0))
        until(lambda: offloaded(engine).resting_bytes, "nothing was written")
        files.inject(Fault(kind="read", error_number=errno.EIO, times=1))
        with pytest.raises(StorageError) as raised:
            engine.backward(loss)
        assert "An activation could not be read back." in raised.value.__notes__
    assert not any(tmp_path.rglob("*.shard"))


def complete_or_warn(engine: Engine) -> None:
    def settled() -> bool:  # what is being written is let go behind that
        gc.collect()
        return not offloaded(engine).resting_bytes

    until(settled)


def _raise(gradient: torch.Tensor) -> None:
    raise ValueError("on purpose")


class ChangedInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.second(x)
        x.detach().add_(1)
        return y.float().square().mean()


def test_a_update_in_place_is_noticed_while_a_tensor_leaves(tmp_path: Path) -> None:
    files = GatedFiles("write", pattern="*activation*")
    chosen = config(activations="disk", activations_path=str(tmp_path))
    with start(chosen, ChangedInPlace(), _files=files) as engine:
        files.open_gate()
        kept = engine(data(0))  # makes the arrays
        until(lambda: offloaded(engine).written_bytes >= offloaded(engine).kept_bytes)
        del kept
        complete_or_warn(engine)
        files.close_gate()
        try:
            loss = engine(data(0))
        finally:
            files.open_gate()
        with pytest.raises(RuntimeError, match="changed in place"):
            engine.backward(loss)


def test_keys_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match=r"zstore\.activations_path"):
        start(config(activations="disk"), deep())


LAYERS, HIDDEN, LENGTH = 3, 64, 160


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS, **shape)
    ).train()


def _trained(engine: Engine) -> dict[str, Any]:
    for number in range(2):
        ids = torch.randint(64, (4, LENGTH), generator=torch.Generator().manual_seed(number))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return engine_digests(engine)


def _on_disk(path: Path, **own: Any) -> dict[str, Any]:
    chosen = make_config(3, zstore={"journal": False, **own}, gradient_accumulation_steps=1)
    chosen["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(path)}
    return chosen


def test_layers_of_transformers_that_are_checkpointed_by_the_switch_or_by_themselves(tmp_path: Path) -> None:
    with start(_on_disk(tmp_path), _llama()) as engine:
        expected = _trained(engine)
    own = _llama()
    checkpoint_layers(own, reentrant=False)
    for model, keys in ((_llama(), {"gradient_checkpointing": True}), (own, {})):
        with start(_on_disk(tmp_path, activations="disk", **keys), model) as engine:
            assert _trained(engine) == expected
            found = engine.statistics().activations
            # The input of each layer, in bf16, and little else before them.
            least = 2 * LAYERS * 4 * LENGTH * HIDDEN * 2
            assert least <= found.kept_bytes < 2 * least


def test_configure_keeps_inputs_on_the_host(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(_ProcessSettings, "in_cpu", None)
    assert not checkpointing.is_configured()
    config = {"train_batch_size": "unread", "activation_checkpointing": {"cpu_checkpointing": True}}
    checkpointing.configure(None, config, partition_activations=True, profile=True)
    assert checkpointing.is_configured()
    assert "partition_activations: not implemented: there is no model parallelism" in caplog.text
    assert "profile: not implemented: blocks are not timed one by one" in caplog.text
    kept: list[int] = []
    monkeypatch.setattr(torch.autograd.graph.save_on_cpu, "__enter__", lambda _: kept.append(1))
    monkeypatch.setattr(torch.autograd.graph.save_on_cpu, "__exit__", lambda *_: None)
    x = torch.ones(2, 64, requires_grad=True)
    checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert kept == [1]
    assert torch.equal(x.grad, torch.ones(2, 64).cos())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"checkpointing\.configure.*cpu_checkpointing: expected true or false"):
        checkpointing.configure(checkpoint_in_cpu="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a config as a dict or the path of a JSON file, got list"):
        checkpointing.configure(deepspeed_config=[config])
