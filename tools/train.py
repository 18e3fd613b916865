"""`zstore train`: the training loop of the command, on one process or under torch's elastic launcher."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zstore.checkpoint.folder import LocalFolder
from zstore.errors import CheckpointMismatchError, storage_error
from zstore.open.sources import folder_of
from zstore.remote.folder import open_folder
from zstore.remote.url import is_url

from .companions import companions
from .launch import end_with_launcher, launch
from .rank_errors import said_once
from .train_config import TrainOptions, answers, load_train_config, offloads

if TYPE_CHECKING:
    import torch

    from zstore.engine import Engine
    from zstore.engine.config import Config

    from .corpus import Corpus
    from .tokens import TokenCorpus

    Text = Corpus | TokenCorpus

_STATE_KEY = "zstore_train"


@dataclass(frozen=True)
class _Position:
    """Where a run is in its data: what a sample number means, and how many were seen."""

    seed: int
    seq_len: int
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What a run begins with."""

    config: Config
    source: tuple[str, str | None] | None
    """Folder and tag of the checkpoint to go on from."""
    position: _Position
    corpus: Text


OFFLOAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}
"""What torch reads once, as it is loaded. Its threads do not spin as they wait, for I/O and the update need the cores
meanwhile; storage that is filled anew for every unit is in huge pages, which costs a tenth."""


def run_train(options: TrainOptions) -> None:
    """Train as `options` say; with `nproc` over 1 in that many processes started here."""
    with said_once():
        if offloads(load_train_config(options)):
            for name, value in OFFLOAD_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
    if options.nproc > 1 and "RANK" not in os.environ:
        _prepare(options)  # what is wrong is said once, and not by every rank
        launch([sys.executable, "-m", "zstore", "train", *options.arguments()], options.nproc)
    else:
        end_with_launcher()
        with said_once():
            _train(options)


def _prepare(options: TrainOptions) -> _Start:
    """Return what the run begins with. Raises what can be known before anything is built, and leaves nothing behind."""
    from .corpus import open_corpus
    from .resume import require_free_tags, resume_source, saved_run
    from .tokens import with_tokenizer

    config = load_train_config(options)
    storage = config.storage_options
    source = resume_source(options.resume, options.save, config.step_folder, storage_options=storage)
    saved = None if source is None else saved_run(*source, _STATE_KEY, storage_options=storage)
    position = _position(options, None if saved is None else saved.position)
    corpus = with_tokenizer(open_corpus(options.data), options.model)
    corpus.require(position.seq_len)
    if options.save is not None:
        # Any of these may end with a save: a signal decides that, too.
        steps = range(1 if saved is None else saved.step + 1, options.steps + 1)
        require_free_tags(options.save, steps, None if saved is None else saved.id, storage_options=storage)
        require_place(options.save, storage)
    return _Start(config=config, source=source, position=position, corpus=corpus)


def require_place(location: str, storage_options: Mapping[str, Any]) -> None:
    """Raise StorageError where nothing can be saved in a folder or at a URL: now, and not after hours of training. A
    folder that is not there yet is not made."""
    if is_url(location):
        place, probe = open_folder(location, storage_options), f".probe-{uuid.uuid4().hex}"
        place.write_small(probe, b"")
        place.remove(probe)
        return
    folder = Path(location)
    try:
        present = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        message = "--save: the folder cannot be written; give one that this user may write"
        raise storage_error(error, message, path=str(folder)) from error


def _train(options: TrainOptions) -> None:
    import torch

    import zstore

    from .models import load_or_build

    start = _prepare(options)
    zstore.init_distributed()
    torch.manual_seed(start.position.seed)
    model = load_or_build(options.model, start.position.seq_len, start.config)
    auto, chosen = answers(options, start.config)
    if chosen and os.environ.get("RANK", "0") == "0":
        print(chosen, file=sys.stderr)
    engine, *_ = zstore.initialize(model=model, config=start.config, auto=auto)
    with engine:
        if options.save is not None:
            engine.steps.note_folder(str(options.save))
        if start.source is not None:
            engine.load_checkpoint(*start.source)
        TrainLoop(options, engine, start.corpus, start.position).run()


def _position(options: TrainOptions, saved: dict[str, Any] | None) -> _Position:
    """Return where to start; a resumed run keeps its seed and sample length, or its order of data would change."""
    if saved is None:
        return _Position(options.seed or 0, options.seq_len or 128)
    for name in ("seed", "seq_len"):
        asked = getattr(options, name)
        if asked is not None and asked != saved[name]:
            raise CheckpointMismatchError(
                f"--{name.replace('_', '-')} {asked}: the checkpoint was trained with {saved[name]}, and the order of its "
                "data depends on it; leave the option out to go on, or start a new run"
            )
    return _Position(int(saved["seed"]), int(saved["seq_len"]), int(saved["samples"]))


class TrainLoop:
    """Steps from where the engine stands to `options.steps`, with metrics and saves."""

    def __init__(self, options: TrainOptions, engine: Engine, corpus: Text, position: _Position) -> None:
        from .metrics import StepMeter

        self._options = options
        self._engine = engine
        self._corpus = corpus
        self._position = position
        self._first_step = engine.global_steps
        engine.step_client_state = self._state
        self._row: dict[str, Any] = {}
        """Metrics of the last step."""
        self._saved = False
        self._meter = StepMeter(engine, position.seq_len)

    def run(self) -> None:
        """Train; the last state is saved, and every save is whole when this returns."""
        from .metrics import MetricsFile, TrainProgress

        options, engine = self._options, self._engine
        leader = engine.global_rank == 0
        if engine.global_steps >= options.steps:
            if leader:
                print(
                    f"the checkpoint is at step {engine.global_steps} of {options.steps}: nothing to do",
                    file=sys.stderr,
                )
            return
        with (
            MetricsFile(options.metrics if leader else None, first_step=engine.global_steps + 1) as metrics,
            TrainProgress(options.steps, engine.global_steps, enabled=leader) as progress,
        ):
            if options.save is not None:
                engine.watch_signals()
            while engine.global_steps < options.steps:
                row = self._row = self._step()
                metrics.write(row)
                progress.show(row)
                due, stop = self._is_save_due(), engine.stop_requested
                if due or stop is not None:
                    stall_s = self._save()
                    progress.say(f"step {engine.global_steps}: save stall {1000 * stall_s:.1f} ms")
                if stop is not None and engine.global_steps < options.steps:
                    engine.save_and_stop(None)
            engine.wait_for_checkpoint()

    def _keep_model_files(self) -> None:
        """Put config and tokenizer of a transformers model beside the checkpoints, where `consolidate` finds them."""
        model, save = Path(self._options.model).expanduser(), self._options.save
        if save is None or not model.exists():
            return
        files = {name: model / name for name in companions(LocalFolder(model))} if model.is_dir() else {}
        place = folder_of(save, self._engine.training_state.config.storage_options)
        for name, path in (files or {"config.json": model}).items():
            place.write_small(name, path.read_bytes())

    def _step(self) -> dict[str, Any]:
        from .models import loss_of

        engine, meter = self._engine, self._meter
        meter.start()
        model = engine.module
        model.train()
        for micro in range(engine.gradient_accumulation_steps()):
            inputs, labels = self._batch(micro)
            with meter.phase("forward"):
                loss = loss_of(engine(inputs, labels=labels))
            meter.add_loss(loss)
            with meter.phase("backward"):
                engine.backward(loss)
            with meter.phase("optimizer"):
                engine.step()
        return meter.finish()

    def _batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's samples of micro-batch number `micro` as (inputs, labels), [micro-batch size, seq_len].

        A sample's number in the run does not depend on the world size, nor does the set of samples of a step.
        """
        engine = self._engine
        size = engine.train_micro_batch_size_per_gpu()
        first = self._samples + (micro * engine.world_size + engine.global_rank) * size
        inputs, labels = self._corpus.batch(range(first, first + size), self._position.seq_len, self._position.seed)
        return inputs.to(engine.device), labels.to(engine.device)

    @property
    def _samples(self) -> int:
        """Samples of the run that its finished steps have seen."""
        steps = self._engine.global_steps - self._first_step
        return self._position.samples + steps * self._engine.train_batch_size()

    def _state(self) -> dict[str, Any]:
        position = self._position
        return {_STATE_KEY: {"seed": position.seed, "seq_len": position.seq_len, "samples": self._samples}}

    def _is_save_due(self) -> bool:
        options, step = self._options, self._engine.global_steps
        if options.save is None:
            return False
        return step == options.steps or (options.save_every is not None and step % options.save_every == 0)

    def _save(self) -> float:
        """Pin the state and let training go on; returns the seconds that took."""
        if not self._saved and self._engine.global_rank == 0:
            self._keep_model_files()
        self._saved = True
        handle = self._engine.save_checkpoint(
            str(self._options.save),
            client_state=self._state(),
            metrics={name: value for name in ("loss", "grad_norm") if (value := self._row[name]) is not None},
            wait=False,
        )
        return float(handle.stall_s)
