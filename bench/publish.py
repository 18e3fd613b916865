"""What publishing weights costs: the trainer, the encoding, and those who receive.

    python -m bench.publish [--model gpt-base] [--steps 10] [--batch 32] [--receivers 16] [--path FOLDER] [--json FILE]

codec    processor time of one thread, masters of N(0, 0.02) in tiles as an update has them, which AdamW changed by one step of
         a rate: elements that change, bytes of the changes against those of all weights, GB of bf16 weights a second that are
         compared, encoded and written; with the two casts and checksums of a tile; and that are read, changed and checked.
training steps with and without publishing in turn, on two engines of one process, on random tokens; and the peak memory of a
         process with it and of one without.
service  one trainer sends each version to a `zstore serve`, and receivers in this process take it: bytes that the trainer
         sent, and seconds until all receivers have it.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crc32c import crc32c

from bench.machine import machine
from zstore.engine.api.engine import Engine
from zstore.engine.api.initialize import initialize
from zstore.publish import Receiver
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings
from zstore.store import MEMORY_TILE_NUMEL
from zstore.tools.sample.models import SHIPPED, Gpt, loss_of
from zstore.weights.delta import Bits, DeltaWriter, Patch, decode, encode, fold
from zstore.weights.versions import parse_index

_TILE = MEMORY_TILE_NUMEL
_TOKEN = "for-the-benchmark-alone"
_RATES = (1e-7, 1e-6, 3e-6, 1e-5)


def codec(numel: int, rate: float, writer: DeltaWriter) -> dict[str, float]:
    """Return the figures of one step of AdamW at a learning rate, whose changes go to `writer`."""
    torch.manual_seed(0)
    changed = nbytes = 0
    encode_s = all_s = apply_s = 0.0
    before, after = torch.empty(_TILE, dtype=torch.bfloat16), torch.empty(_TILE, dtype=torch.bfloat16)
    for _ in range(max(1, numel // _TILE)):
        master = torch.randn(_TILE) * 0.02
        parameter = torch.nn.Parameter(master)
        optimizer = torch.optim.AdamW([parameter], lr=rate, weight_decay=0.0)
        for _ in range(3):  # moments of a few steps: updates of different sizes
            parameter.grad = torch.randn(_TILE)
            optimizer.step()
        old = parameter.detach().clone()
        parameter.grad = torch.randn(_TILE)
        optimizer.step()
        buffer = bytearray(2 * _TILE)
        former_bytes = writer.nbytes
        started = time.thread_time()
        before.copy_(old)
        after.copy_(parameter.detach())
        bits_before, bits_after = _bits(before), _bits(after)
        crc32c(bits_before.data)
        crc = int(crc32c(bits_after.data))
        begun = time.thread_time()
        writer.add("w", 0, bits_before, bits_after, crc)
        ended = time.thread_time()
        encode_s += ended - begun
        all_s += ended - started
        values, gaps = encode(bits_before, bits_after)
        changed += values.size
        nbytes += writer.nbytes - former_bytes
        patch = Patch(first=0, stop=_TILE, values=values, gaps=gaps, crc=crc, source=Path("here"))
        started = time.thread_time()
        into = np.frombuffer(buffer, np.uint16)
        into[:] = bits_before
        fold("w", 0, into, [patch])
        apply_s += time.thread_time() - started
        if not np.array_equal(into, bits_after) or decode(gaps).size != values.size:
            raise AssertionError("the changes do not give the weights")
    tiles = max(1, numel // _TILE)
    return {
        "changed_percent": 100 * changed / (tiles * _TILE),
        "bytes_percent": 100 * nbytes / (2 * tiles * _TILE),
        "encode_gb_per_s": 2e-9 * tiles * _TILE / encode_s,
        "cast_encode_check_gb_per_s": 2e-9 * tiles * _TILE / all_s,
        "apply_gb_per_s": 2e-9 * tiles * _TILE / apply_s,
    }


def _bits(values: torch.Tensor) -> Bits:
    return values.view(torch.int16).numpy().view(np.uint16)


def _engine(case: argparse.Namespace, to: Path | str | None, **options: Any) -> Engine:
    torch.manual_seed(0)
    own: dict[str, Any] = {} if to is None else {"publish": {"to": str(to), "full_every": 10**9}}
    config = {
        "train_batch_size": case.batch,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": case.rate}},
        "zstore": {"journal": False, "storage_options": options, **own},
        "steps_per_print": 0,
    }
    return initialize(model=Gpt(SHIPPED[case.model]), config=config)[0]


def _step(engine: Engine, case: argparse.Namespace) -> float:
    ids = torch.randint(0, SHIPPED[case.model].vocab_size, (case.batch, 129))
    started = time.perf_counter()
    engine.backward(loss_of(engine(ids[:, :-1], labels=ids[:, 1:])))
    engine.step()
    return time.perf_counter() - started


def training(case: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return what a step takes with and without publishing."""
    to = folder / "weights"
    engines = [_engine(case, None), _engine(case, to)]
    taken = [(_step(engines[0], case), _step(engines[1], case)) for _ in range(case.steps + 2)]
    for engine in engines:
        engine.close()
    index = to / f"weight_v{case.steps + 2:06d}/model.safetensors.index.json"
    last = parse_index(index.read_bytes(), "the last version")
    parameters = sum(parameter.numel() for parameter in engines[0].module.parameters())
    return {
        "parameters": parameters,
        "tokens": 128 * case.batch,
        "step_s": statistics.median(plain for plain, _ in taken[2:]),
        "more_s": statistics.median(one - plain for plain, one in taken[2:]),
        "ratio_of_pairs": statistics.median(one / plain for plain, one in taken[2:]),
        "bytes_percent": 50 * last.delta_bytes / parameters,
    }


def memory(case: argparse.Namespace, folder: Path) -> dict[str, int]:
    """Return the peak resident bytes of training with and without publishing, each in a process of its own."""
    found = {}
    for name, to in (("plain", ""), ("publishing", str(folder / "of-memory"))):
        words = ["--peak-of", to, "--model", case.model, "--rate", str(case.rate), "--batch", "4"]
        command = [sys.executable, "-m", "bench.publish", *words]
        found[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def peak_of(case: argparse.Namespace) -> int:
    """Train a few steps in this process; return its peak resident bytes."""
    with _engine(case, case.peak_of or None) as engine:
        for _ in range(4):
            _step(engine, case)
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("VmHWM:")[2].split()[0])


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    folder.mkdir()
    settings = Settings(roots=(Root.parse(str(folder)),), port=0, token=_TOKEN, allow_actions=True)
    with serving(settings) as base:
        yield f"{base}/gpt/weights"


def service(case: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return what it takes until all receivers of a service have a version."""
    options = {"token": _TOKEN}
    sent: list[int] = []
    one_s: list[float] = []
    seconds: list[float] = []
    with _served(folder / "runs") as url, _engine(case, url, **options) as engine:
        models = [Gpt(SHIPPED[case.model]).to(torch.bfloat16) for _ in range(case.receivers)]
        first, *others = [Receiver(one, url, storage_options=options) for one in models]
        publisher = engine.extras["zstore.publish"]
        traffic = publisher._target._service.connection.traffic  # type: ignore[attr-defined]
        with ThreadPoolExecutor(case.receivers) as threads:
            for _ in range(case.steps + 1):
                before = traffic.written_bytes
                _step(engine, case)
                sent.append(traffic.written_bytes - before)
                started = time.perf_counter()
                first.update()
                one_s.append(time.perf_counter() - started)
                started = time.perf_counter()
                list(threads.map(Receiver.update, others))
                seconds.append(time.perf_counter() - started)
        if len({tuple(crc32c(_bits(p.detach()).data) for p in one.parameters()) for one in models}) != 1:
            raise AssertionError("receivers have different weights")
    return {
        "receivers": case.receivers,
        "sent_bytes": statistics.median(sent[1:]),
        "first_receiver_s": statistics.median(one_s[1:]),
        "other_receivers_s": statistics.median(seconds[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-base", choices=list(SHIPPED))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="sequences of 128 tokens in a step")
    parser.add_argument("--numel", type=int, default=1 << 26, help="elements of the codec")
    parser.add_argument("--receivers", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-6, help="learning rate of training")
    parser.add_argument("--path", type=Path, help="folder for versions, for a while")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of is not None:
        print(peak_of(options))
        return
    logging.getLogger("zstore.serve").setLevel(logging.WARNING)
    threads = torch.get_num_threads()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        folder = Path(name)
        torch.set_num_threads(1)
        figures["codec"] = {}
        for rate in _RATES:
            with (folder / "changes").open("wb") as file:
                figures["codec"][f"{rate:g}"] = codec(options.numel, rate, DeltaWriter(file))
        torch.set_num_threads(threads)
        figures["training"] = training(options, folder)
        figures["memory"] = memory(options, folder)
        figures["service"] = service(options, folder)
        figures["machine"] = machine(folder)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
