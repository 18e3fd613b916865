"""The host kernel: torch's bits in one pass, and torch's kernel wherever it cannot be built or differs."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.bits import engine_digests
from tests.engine.models import make_net
from tests.engine.runs import make_config, start, take_steps
from zstore.engine.runtime import native
from zstore.engine.runtime.native import TYPES, HostKernel, StepTensors, host_kernel
from zstore.optim import Offloaded

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no cc")
SETTINGS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8, "step": 3.0}
HOW: Any = {"decoupled": True, "factor": 0.37}


def kernel() -> HostKernel:
    found = host_kernel()
    if found is None:
        pytest.skip("the host kernel is off here")
    return found


def state(sizes: Any, offset: int = 0, odd: float = 1, largest: Any = 0, gradient: Any = torch.bfloat16) -> StepTensors:
    """Return parameters of `sizes`, the first `offset` elements into its memory; some gradients are multiplied by `odd`."""
    rows = torch.randn(5, offset + sum(sizes), generator=torch.Generator().manual_seed(len(sizes) + offset))
    rows[:, ::7] *= 1e-6
    rows[2:4].square_()
    rows[4, ::9] *= odd
    master, *slots = (row[offset:].split(sizes) for row in rows[: 4 if largest else 3])
    gradients = rows[4].to(gradient)[offset:].split(sizes)
    return StepTensors(master, list(zip(*slots, strict=True)), gradients, [None] * len(sizes))


def by_torch(tensors: StepTensors, settings: dict[str, float], *, decoupled: bool, factor: float) -> None:
    averages, squares, *largest = zip(*tensors.slots, strict=True)
    (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
        tensors.masters,
        [gradient.float() * abs(factor) for gradient in tensors.gradients],
        averages,
        squares,
        largest[0] if largest else (),
        [torch.tensor(settings["step"])] * len(averages),
        **{name: value for name, value in settings.items() if name != "step"},
        amsgrad=bool(largest),
        maximize=factor < 0,
    )


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool((((one == two) & (one.signbit() == two.signbit())) | (one.isnan() & two.isnan())).all())
    return all(each is None or same(each, other) for each, other in zip(one, two, strict=True))


@given(
    sizes=st.lists(st.integers(1, 70) | st.integers(32_000, 70_000), min_size=1, max_size=6),
    form=st.fixed_dictionaries({
        "offset": st.integers(0, 9), "largest": st.booleans(),
        "gradient": st.sampled_from(list(TYPES)), "odd": st.sampled_from([1.0, 0.0, float("inf"), float("nan")]),
    }),
    how=st.fixed_dictionaries({"decoupled": st.booleans(), "factor": st.sampled_from([1.0, 0.37, -1.0, -(2.0**-16)])}),
    weight=st.sampled_from([None, torch.bfloat16, torch.float16]),
    num_threads=st.integers(1, 4),
    settings=st.fixed_dictionaries({
        "lr": st.sampled_from([0.0, 1e-4, 0.013]),
        "beta1": st.sampled_from([0.0, 0.4, 0.5, 0.9, 0.95]),
        "beta2": st.sampled_from([0.0, 0.3, 0.95, 0.999]),
        "weight_decay": st.sampled_from([0.0, 0.01, 3.923270106315607]),
        "eps": st.sampled_from([1e-8, 0.0, 1e-3]),
        "step": st.sampled_from([1.0, 2.0, 1000.0, 2.0**24 + 1, float("inf")]),
    }),
)  # fmt: skip
def test_torchs_bits(sizes: list[int], form: Any, how: Any, weight: Any, num_threads: int, settings: Any) -> None:
    mine, theirs = state(sizes, **form), state(sizes, **form)
    if weight is not None:
        mine = mine._replace(weights=[torch.empty_like(master, dtype=weight) for master in mine.masters])
    for _ in range(2):
        kernel().update(settings | how, mine, num_threads)
        by_torch(theirs, settings, **how)
    assert same(mine[:2], theirs[:2])
    assert same(mine.weights, [master.to(weight) for master in theirs.masters])


def test_bits_of_tails() -> None:
    """Compare 500 tails of values of their own, with the clip's factor, at 1 to 4 threads."""
    for num_threads, how in [(n, HOW | {"decoupled": each}) for n in range(1, 5) for each in (True, False)]:
        mine, theirs = (state([1_000_003, *(1 + number % 31 for number in range(500))]) for _ in range(2))
        kernel().update(SETTINGS | how, mine, num_threads)
        by_torch(theirs, SETTINGS, **how)
        assert same(mine[:2], theirs[:2])


def _child(code: str, **environment: str) -> str:
    code = f"import sys; sys.path[:0] = {sys.path!r}\nfrom tests.engine.test_host_kernel import *\n{code}"
    command, environment = [sys.executable, "-c", code], os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_compiler
def test_a_torch_without_vectors_has_its_own_form() -> None:
    assert "body=0, tail=0" in _child("test_bits_of_tails(); print(kernel().form)", ATEN_CPU_CAPABILITY="default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_is_cast_as_torch_does(dtype: torch.dtype) -> None:
    """Without a rate the weight is the master, and without betas the first moment is the gradient."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    halves = halves[halves.isfinite()]
    near = torch.cat([halves.float().view(torch.int32) + delta for delta in (-(2**12) - 1, -(2**12), -1, 0, 1, 2**12)])
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    masters = torch.cat([near, bits.to(torch.int32)]).view(torch.float32)
    masters = torch.cat([masters[~masters.isnan()], torch.tensor([float("inf"), -float("inf"), 65519.0, 65520.0])])
    gradients = halves.repeat(masters.numel() // halves.numel() + 1)[: masters.numel()]
    average, square, before = torch.zeros_like(masters), torch.zeros_like(masters), masters.clone()
    tensors = StepTensors([masters], [[average, square]], [gradients], [torch.empty_like(masters, dtype=dtype)])
    casts = {"lr": 0.0, "beta1": 0.0, "weight_decay": 0.0, "decoupled": True, "factor": 1.0}
    kernel().update(SETTINGS | casts, tensors)
    assert torch.equal(masters, before)
    assert torch.equal(tensors.weights[0].view(torch.int16), masters.to(dtype).view(torch.int16))
    assert torch.equal(average, gradients.float())
    for place in (masters, gradients):
        place[:2] = float("nan")
    odd = torch.frombuffer(bytearray(2 * masters.numel() + 1), dtype=dtype, offset=1)  # as a mapped file may have
    kernel().update(SETTINGS | HOW, tensors._replace(weights=[odd]))
    assert bool(odd[:2].isnan().all())


def stepped(num_threads: int = 3) -> StepTensors:
    tensors = state([300_007, 5, 70_000])
    for _ in range(3):
        kernel().update(SETTINGS | HOW, tensors, num_threads)
    return tensors


def test_several_callers_update_at_once() -> None:
    with ThreadPoolExecutor(4) as callers:
        assert all(same(each[:2], stepped(1)[:2]) for each in callers.map(stepped, 4 * [3]))


def test_threads_treat_subnormal_numbers_as_their_caller_does() -> None:
    tensors = state([300_000])
    kernel().update(SETTINGS | HOW, tensors, 4)  # makes the threads
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor has no such mode")
    try:
        tensors.slots[0][1].fill_(1e-38)
        kernel().update(SETTINGS | HOW | {"factor": 0.0}, tensors, 4)
        assert bool((tensors.slots[0][1] == 0).all())
    finally:
        torch.set_flush_denormal(False)


def test_a_forked_child_has_threads_of_its_own_and_ends() -> None:
    """Also if another thread of the parent was in an update."""
    kernel()
    code = (
        "import threading; expected, ended = stepped(), threading.Event()\n"
        "def others():\n"
        "    while not ended.is_set(): stepped()\n"
        "other = threading.Thread(target=others); other.start()\n"
        "for _ in range(5):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os._exit(0 if same(stepped()[:2], expected[:2]) else 3)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "ended.set(); other.join()\n"
        "print(same(stepped()[:2], expected[:2]))"
    )
    assert _child(code).strip() == "True"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    kernel()
    masters, update = [], HostKernel.update
    take = lambda self, given, new, *rest: masters.extend(new.masters) or update(self, given, new, *rest)  # noqa: E731
    monkeypatch.setattr(HostKernel, "update", take)
    return masters


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_an_engine_names_its_kernel_and_has_the_same_bits(tier: str, taken: list[torch.Tensor], tmp_path: Path) -> None:
    found = {}
    for name in ("auto", "torch"):
        config = make_config(3, tier, tmp_path, tier, gradient_clipping=0.1, zstore={"host_kernel": name})
        with start(config, make_net(vocab=1203)) as engine:
            take_steps(engine, 3)
            engine.save_checkpoint(str(tmp_path / "saves"), name)
            found[name] = engine_digests(engine)
        updated = sum(master.numel() for master in taken)  # of three steps; a few parameters have no gradient
        assert 3 * 105_000 < updated < 3 * 112_000 if name == "auto" else updated == 0
        record = json.loads((tmp_path / "saves" / name / "zstore.json").read_text())
        assert record["state"]["engine"]["host_kernel"] == ("adamw.c" if name == "auto" else "torch")
        taken.clear()
    assert found["auto"] == found["torch"]


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_offloaded_optimizers_have_it(device: Any, dtype: Any, taken: list[torch.Tensor], tmp_path: Path) -> None:
    parameter = torch.randn(70_000).to(dtype).requires_grad_()
    for settings in ({}, {"amsgrad": True, "maximize": True, "weight_decay": 0.1}):
        with Offloaded(torch.optim.Adam, [parameter], device=device, path=tmp_path, **settings) as optimizer:
            parameter.grad = torch.randn(70_000).to(dtype)
            optimizer.step()
        assert sum(master.numel() for master in taken) == 70_000
        taken.clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache, not made yet, of a process without the library of a wheel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_WHEEL", "nothing")
    monkeypatch.setattr(native, "_COMPILE_LIMIT_S", 150.0)  # other tests have the cores too
    return tmp_path / "cache" / "zstore-kernel"


Spoil = Callable[[Path, pytest.MonkeyPatch], object]


def _compiler(script: str, limit_s: float = 60.0) -> Spoil:
    def make(folder: Path, patch: pytest.MonkeyPatch) -> None:
        place = folder.parents[1]
        (place / "cc").write_text(f"#!/bin/sh\n{script}\n")
        (place / "cc").chmod(0o755)
        patch.setattr(native, "_COMPILE_LIMIT_S", limit_s)
        patch.setenv("PATH", str(place), prepend=os.pathsep)

    return make


SPOILS: dict[str, Spoil] = {
    "another user's": lambda folder, patch: (
        folder.mkdir(parents=True) or patch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    ),
    "open to others": lambda folder, patch: folder.mkdir(parents=True) or folder.chmod(0o777),
    "a link": lambda folder, patch: folder.parent.mkdir() or folder.symlink_to(folder.parents[1]),
    "unwritable": lambda folder, patch: folder.parent.write_text(""),
    "no home": lambda folder, patch: patch.setattr(native.os, "environ", {}) or patch.setattr(Path, "home", None),
    "no compiler": lambda folder, patch: patch.setenv("PATH", str(folder)),
    "a compiler that fails": _compiler("echo no >&2; exit 1"),
    "one that makes nothing": _compiler("exit 0"),
    "one that makes no library": _compiler('while [ "$1" != -o ]; do shift; done; echo no > "$2"'),
    "one that hangs": _compiler("sleep 1000 & sleep 1000", 0.5),
    "no AVX2": _compiler(f"exec {shutil.which('cc')} '-D__builtin_cpu_supports(x)=0' -D__x86_64__ \"$@\""),
    "no form": lambda folder, patch: patch.setattr(native, "_BODIES", []),
}


@pytest.mark.parametrize("what", SPOILS)
def test_torchs_kernel_serves_where_there_is_no_library(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    SPOILS[what](folder, monkeypatch)
    with caplog.at_level(logging.DEBUG, "zstore"):
        assert host_kernel.__wrapped__() is None
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert "torch's kernel updates state in host memory" in record.getMessage()
    assert not list(folder.parents[1].rglob("build-*"))


@needs_compiler
def test_the_cache_is_the_users_alone_and_a_cut_file_is_built_anew(folder: Path) -> None:
    assert host_kernel.__wrapped__() is not None
    (file,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", whole[:-1] + b"?"):
        file.unlink()  # not changed in place: this process has it mapped
        file.write_bytes(content)
        assert host_kernel.__wrapped__() is not None
        assert len(file.read_bytes()) == len(whole)
    before = file.stat().st_mtime_ns
    assert host_kernel.__wrapped__() is not None
    assert file.stat().st_mtime_ns == before


@needs_compiler
def test_processes_that_build_at_once_each_have_it(folder: Path) -> None:
    with ThreadPoolExecutor(2) as children:
        list(children.map(_child, 2 * ["native._WHEEL, native._COMPILE_LIMIT_S = '-', 150; assert host_kernel()"]))
    assert len(list(folder.iterdir())) == 1
