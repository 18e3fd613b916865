"""`zstore train`: a run in one process, under torch's elastic launcher, or in processes that it starts."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zstore.checkpoint import tags
from zstore.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UsageError,
    storage_error,
)
from zstore.io import is_url, user_location
from zstore.open.sources import folder_of, open_source, split_location
from zstore.remote.upload import require_uploads

from .options import StorageOption, parse_file, parse_options
from .printing import PLAIN_LINE_S
from .run.ranks import RunJob, run_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from zstore.engine import Engine
    from zstore.engine.config.config import Config

    from .sample import Corpus

_BATCH = "train_micro_batch_size_per_gpu"
_WARMUP = "scheduler.params.warmup_num_steps"
_TOTAL = "scheduler.params.total_num_steps"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Command-line options. None means not given."""

    config: Annotated[
        Path, typer.Option(help="Configuration, JSON in the DeepSpeed dialect.", parser=parse_file, metavar="FILE")
    ]
    model: Annotated[
        str,
        typer.Option(
            help="gpt-tiny, gpt-small or gpt-base; or a transformers config.json (extra hf). Weights are initialized randomly."
        ),
    ]
    steps: Annotated[int, typer.Option(help="Total number of steps, including those before a resume.", min=1)]
    data: Annotated[
        Path | None,
        typer.Option(help="Text file, or a folder of text files, read as bytes (default: Python's standard library)."),
    ] = None
    save: Annotated[
        str | None,
        typer.Option(
            help="Folder or URL for checkpoints; one is saved at the end.", metavar="DIR", parser=user_location
        ),
    ] = None
    save_every: Annotated[int | None, typer.Option(help="Also save every K steps.", min=1, metavar="K")] = None
    resume: Annotated[
        str | None,
        typer.Option(
            help="Resume from a checkpoint; DIR may be a URL. auto: from the newest in --save, if any.",
            metavar="DIR[@TAG]|auto",
        ),
    ] = None
    nproc: Annotated[int, typer.Option(help="Processes to start on this machine.", min=1, metavar="N")] = 1
    """Ignored under torchrun, which sets it."""
    metrics: Annotated[
        Path | None, typer.Option(help="Write one JSON object per step to this file.", metavar="FILE.jsonl")
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Seed for weights and data order (default: the resumed run's or 0).", metavar="N")
    ] = None
    seq_len: Annotated[
        int | None, typer.Option(help="Bytes per sample (default: the resumed run's, or 128).", min=2, metavar="N")
    ] = None
    micro_batch: Annotated[
        int | None,
        typer.Option(
            help="Micro-batch size per rank; overrides the configuration (default: the configuration's, or 1).",
            min=1,
            metavar="N",
        ),
    ] = None
    storage_option: StorageOption = None

    def __post_init__(self) -> None:
        """Reject options that require others that are missing."""
        if self.save_every is not None and self.save is None:
            raise UsageError("--save-every needs --save DIR, the folder to save to")
        if self.resume == "auto" and self.save is None:
            raise UsageError("--resume auto needs --save DIR, the folder to look in")


def load_train_config(options: TrainOptions) -> Config:
    """Return the config file's content with the command line's overrides. Raises ConfigError naming the file."""
    from zstore.engine.config.config import load_config, read_config

    name = str(options.config)
    raw = read_config(options.config)
    load_config(raw, name=name)  # checks the sections that are changed below
    # The command shows its own progress, so the engine's progress lines are off by default.
    raw.setdefault("steps_per_print", 0)
    if options.micro_batch is not None:
        raw[_BATCH] = options.micro_batch
    if options.seed is not None:
        raw["seed"] = options.seed
    if options.storage_option:
        section = raw["zstore"] = raw.get("zstore") or {}
        previous = section.get("storage_options") or {}
        section["storage_options"] = {**previous, **parse_options(options.storage_option)}
    return load_config(raw, name=name)


def auto_values(options: TrainOptions, config: Config) -> dict[str, Any]:
    """Return the values for "auto" in `config`: the options', a micro-batch of 1, and a warm-up of a tenth of the steps."""
    from zstore.engine.config.resolve import open_keys

    settings = config.settings
    values: dict[str, Any] = {_TOTAL: options.steps}
    if _WARMUP in open_keys(settings):
        values[_WARMUP] = max(1, min(1000, options.steps // 10))  # at most DeepSpeed's default
    sizes = (settings.train_batch_size, settings.train_micro_batch_size_per_gpu)
    if all(size in (None, "auto") for size in sizes) and settings.batch_section is None:
        values[_BATCH] = 1
    return values


OFFLOAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}
"""Variables that torch reads once, when it is imported. Its threads then do not spin while they wait, since I/O and the
update need the cores; and storage that is refilled for every unit is in huge pages, at a tenth of the cost."""


def train_command(options: TrainOptions) -> None:
    """Train with `options`, in `nproc` child processes if it is more than 1."""
    config = load_train_config(options)
    if any(section.device != "none" for section in (config.offload_optimizer, config.offload_param)):
        for name, value in OFFLOAD_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if options.nproc > 1 and "RANK" not in os.environ:
        _prepare(options, config)  # reports errors once instead of on every rank
        launch([sys.executable, "-m", "zstore", *sys.argv[1:]], options.nproc)  # sets RANK for each child
    else:
        _train(options, config)


def _prepare(options: TrainOptions, config: Config) -> tuple[Source | None, Position, Corpus]:
    """Return the checkpoint to resume from, the position in the data, and the data. Raises errors that can be detected before
    anything is built, and creates no files."""
    from .sample import open_corpus

    storage = config.zstore.storage_options or {}
    source = resume_source(options.resume, options.save, storage_options=storage)
    position = start_position(options.seed, options.seq_len, source, storage_options=storage)
    corpus = open_corpus(options.data)
    corpus.require_length(position.seq_len)
    if options.save is not None:
        if source is None:
            require_empty_folder(options.save, storage_options=storage)
        _require_writable(options.save, storage)
    return source, position, corpus


def _require_writable(location: str, storage_options: Mapping[str, Any]) -> None:
    """Raise StorageError before training starts if a folder or URL cannot be written to. A missing folder is not created."""
    if is_url(location):
        require_uploads(location, storage_options)
        return
    folder = Path(location)
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        message = "--save: the folder is not writable; choose one that this user can write to"
        raise storage_error(error, message, path=str(folder)) from error


def _train(options: TrainOptions, config: Config) -> None:
    import torch

    import zstore

    from .sample import build_model

    source, position, corpus = _prepare(options, config)
    zstore.init_distributed()
    torch.manual_seed(position.seed)
    with zstore.Init(config=config):
        model = build_model(options.model, position.seq_len)
    engine, *_ = zstore.initialize(model=model, config=config, auto=auto_values(options, config))
    with engine:
        if options.save is not None:
            engine.note_save_folder(str(options.save))
        if source is not None:
            engine.load_checkpoint(*source)
        TrainLoop(options, engine, corpus, position).run()


_GRACE_PERIOD_S = 20.0
"""Time for ranks to exchange errors and exit after one has failed."""


def launch(command: Sequence[str], num_ranks: int) -> None:
    """Run `command` in `num_ranks` processes of one group, each with the variables that torchrun sets.

    Raises SystemExit with the exit code of `zstore run` if any of them fails. None of them outlives this process."""
    result = run_ranks(RunJob(command=tuple(command), num_ranks=num_ranks, shutdown_timeout_s=_GRACE_PERIOD_S))
    result.print_failure()
    if result.exit_code:
        raise SystemExit(result.exit_code)


_log = logging.getLogger("zstore")


class TrainLoop:
    """Runs steps from the engine's current step to `options.steps`, with metrics and saves."""

    def __init__(self, options: TrainOptions, engine: Engine, corpus: Corpus, position: Position) -> None:
        self._options = options
        self._engine = engine
        self._corpus = corpus
        self._position = position
        self._first_step = engine.global_steps
        self._row: dict[str, Any] = {}
        """Metrics of the last step."""
        self._last_line_s = float("-inf")
        """Time of the last printed progress line."""
        engine.journal.note(total_steps=options.steps, tokens=engine.train_batch_size() * position.seq_len)

    def run(self) -> None:
        """Train, save the final state, and wait for all saves."""
        options, engine = self._options, self._engine
        if engine.global_steps >= options.steps:
            self._print(f"the checkpoint is at step {engine.global_steps} of {options.steps}: nothing to do")
            return
        if options.metrics is not None and engine.global_rank == 0:
            _truncate_metrics(options.metrics, engine.global_steps + 1)
        if options.save is not None:
            engine.watch_signals()
        engine.module.train()
        while engine.global_steps < options.steps:
            self._row = self._step()
            self._report()
            stop = engine.stop_requested
            if self._is_save_due() or stop is not None:
                self._print(f"step {engine.global_steps}: the save stalled training for {1000 * self._save():.1f} ms")
            if stop is not None and engine.global_steps < options.steps:
                engine.save_and_stop(None)
        engine.wait_for_checkpoint()

    def _step(self) -> dict[str, Any]:
        """Take a step and return its metrics: the mean loss over ranks and micro-batches, bytes summed over ranks."""
        from zstore.engine.training.loader import loss_of

        engine = self._engine
        started_s, store_before = time.perf_counter(), engine.statistics().store
        losses = []
        for micro in range(engine.gradient_accumulation_steps()):
            inputs, labels = self._batch(micro)
            loss = loss_of(engine(inputs, labels=labels))
            losses.append(loss.detach().float())
            engine.backward(loss)
            engine.step()
        step_s, after = time.perf_counter() - started_s, engine.statistics()
        local = (
            sum(map(float, losses)) / len(losses),
            after.store.disk_read_bytes - store_before.disk_read_bytes,
            after.store.disk_write_bytes - store_before.disk_write_bytes,
            after.process_peak_bytes,
        )
        loss, read, written, peak = (sum(column) for column in zip(*engine.world.all_gather_object(local), strict=True))
        return {
            "step": engine.global_steps,
            "loss": loss / engine.world_size,
            "lr": engine.get_lr()[0],
            "grad_norm": engine.get_global_grad_norm(),
            "tokens_per_s": engine.train_batch_size() * self._position.seq_len / step_s,
            "step_s": step_s,
            "disk_read_bytes": read,
            "disk_write_bytes": written,
            "peak_memory_bytes": peak,
        }

    def _batch(self, micro: int) -> tuple[Tensor, Tensor]:
        """Return this rank's samples of micro-batch number `micro` as (inputs, labels), [micro-batch size, seq_len].

        A sample's number in the run does not depend on the world size, nor does the set of samples of a step.
        """
        engine = self._engine
        size = engine.train_micro_batch_size_per_gpu()
        first = self._samples + (micro * engine.world_size + engine.global_rank) * size
        ids = self._corpus.batch(range(first, first + size), self._position.seq_len, self._position.seed)
        return ids.to(engine.device), ids.to(engine.device)

    @property
    def _samples(self) -> int:
        """Number of samples that the run's completed steps have used."""
        steps = self._engine.global_steps - self._first_step
        return self._position.samples + steps * self._engine.train_batch_size()

    def _is_save_due(self) -> bool:
        options, step = self._options, self._engine.global_steps
        if options.save is None:
            return False
        return step == options.steps or (options.save_every is not None and step % options.save_every == 0)

    def _save(self) -> float:
        """Start a save in the background; return the seconds by which it delayed training."""
        handle = self._engine.save_checkpoint(
            str(self._options.save),
            client_state={STATE_KEY: asdict(self._position) | {"samples": self._samples}},
            metrics={name: value for name in ("loss", "grad_norm") if (value := self._row[name]) is not None},
            wait=False,
        )
        return float(handle.stall_s)

    def _report(self) -> None:
        """Append the step's metrics to the metrics file, and print progress at intervals."""
        row, path = self._row, self._options.metrics
        if self._engine.global_rank != 0:
            return
        if path is not None:
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                _log.warning("--metrics %s: lines may be missing; training continues: %s", path, error)
        now_s = time.monotonic()
        interval_s = 1 if sys.stderr.isatty() else PLAIN_LINE_S
        if row["step"] < self._options.steps and now_s - self._last_line_s < interval_s:
            return
        self._last_line_s = now_s
        disk_bytes = row["disk_read_bytes"] + row["disk_write_bytes"]
        self._print(
            f"step {row['step']}/{self._options.steps}  loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s  "
            + (f"disk {disk_bytes / row['step_s'] / 1e9:.2f} GB/s  " if disk_bytes else "")
            + f"memory {row['peak_memory_bytes'] / 1e9:.2f} GB"
        )

    def _print(self, text: str) -> None:
        if self._engine.global_rank == 0:
            print(text, file=sys.stderr, flush=True)


def _truncate_metrics(path: Path, first_step: int) -> None:
    """Remove the lines of steps that a resumed run repeats, and an incomplete line of a killed run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] < first_step:
                lines.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    path.write_text("".join(lines), encoding="utf-8")


STATE_KEY = "zstore_train"
"""Key of the run's position in the client state."""

Source = tuple[str, str | None]
"""A folder or URL of checkpoints, and a tag (None: the newest)."""


@dataclass(frozen=True)
class Position:
    """Position of a run in its data: the settings that determine the samples, and the number used."""

    seed: int
    seq_len: int
    samples: int = 0


def resume_source(
    resume: str | None, save: str | None, *, storage_options: Mapping[str, Any] | None = None
) -> Source | None:
    """Return the source named by `DIR`, `DIR@TAG` or `auto`; None to start a new run. Raises CheckpointNotFoundError if DIR
    does not exist."""
    if resume is None:
        return None
    if resume == "auto":
        try:
            open_source(save or "", storage_options=storage_options).close()
        except CheckpointNotFoundError:
            return None
        return save or "", None
    folder, tag = split_location(resume)
    if tag is not None or is_url(folder) or Path(folder).is_dir():
        return folder, tag
    raise CheckpointNotFoundError(
        f"--resume {resume}: expected DIR or DIR@TAG of a saved checkpoint, but there is no such folder"
    )


def start_position(
    seed: int | None, seq_len: int | None, source: Source | None, *, storage_options: Mapping[str, Any] | None = None
) -> Position:
    """Return the position to start from; a resumed run keeps its seed and sample length, which determine its data order."""
    if source is None:
        return Position(seed or 0, seq_len or 128)
    with open_source(*source, storage_options=storage_options) as checkpoint:
        state = checkpoint.record.state.get("client_state", {}).get(STATE_KEY)
    if not isinstance(state, dict) or not {"seed", "seq_len", "samples"} <= state.keys():
        raise CheckpointMismatchError(
            f"{source[0]}: the checkpoint was not saved by `zstore train`, so its position in the data is unknown; load it "
            "with `engine.load_checkpoint` in the script that saved it"
        )
    saved = Position(int(state["seed"]), int(state["seq_len"]), int(state["samples"]))
    for option, given, saved_value in (("--seed", seed, saved.seed), ("--seq-len", seq_len, saved.seq_len)):
        if given is not None and given != saved_value:
            raise CheckpointMismatchError(
                f"{option} {given}: the checkpoint's run used {saved_value}, and the order of its data depends on it; "
                "omit the option to resume, or start a new run"
            )
    return saved


def require_empty_folder(save: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Raise CheckpointExistsError if `save` has checkpoints, since a new run would save under the same names."""
    try:
        existing = tags(folder_of(save, storage_options))
    except CheckpointNotFoundError:
        return
    if existing:
        raise CheckpointExistsError(
            f"--save {save} already contains {existing[-1].tag} from another run; this run would save under the same names: "
            f"pass --resume auto to continue it, choose another folder, or remove them (`zstore prune {save}`)"
        )
