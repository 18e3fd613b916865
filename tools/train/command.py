"""`zstore train`: a run on one process, under torch's elastic launcher, or on processes started here."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zstore.errors import storage_error
from zstore.io import is_url
from zstore.remote.upload import require_uploads

from ..run.ranks import RunJob, run_ranks
from .config import TrainOptions, answers, load_train_config
from .resume import Position, Source, require_own_folder, resume_source, start_position

if TYPE_CHECKING:
    from zstore.engine.config.config import Config

    from ..sample.corpus import Corpus


OFFLOAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}
"""Variables that torch reads once, when it is imported. Its threads do not spin while they wait, since I/O and the update
need the cores; storage that is refilled for every unit is in huge pages, which costs a tenth."""


def train_command(options: TrainOptions) -> None:
    """Train as `options` say; with `nproc` over 1 in that many processes started here."""
    config = load_train_config(options)
    if any(each.device != "none" for each in (config.offload_optimizer, config.offload_param)):
        for name, value in OFFLOAD_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if options.nproc > 1 and "RANK" not in os.environ:
        _prepare(options)  # errors are reported once, not by every rank
        launch([sys.executable, "-m", "zstore", *sys.argv[1:]], options.nproc)  # RANK is set there
    else:
        _train(options)


def _prepare(options: TrainOptions) -> tuple[Config, Source | None, Position, Corpus]:
    """Return the config, the checkpoint to resume from, the position in the data, and the data. Raises errors that can be
    found before anything is built, and leaves nothing behind."""
    from ..sample.corpus import open_corpus

    config = load_train_config(options)
    storage = config.storage_options
    source = resume_source(options.resume, options.save, storage_options=storage)
    position = start_position(options.seed, options.seq_len, source, storage_options=storage)
    corpus = open_corpus(options.data)
    corpus.require(position.seq_len)
    if options.save is not None:
        if source is None:
            require_own_folder(options.save, storage_options=storage)
        _require_place(options.save, storage)
    return config, source, position, corpus


def _require_place(location: str, storage_options: Mapping[str, Any]) -> None:
    """Raise StorageError if nothing can be saved in a folder or at a URL: now, and not after hours of training. A
    missing folder is not created."""
    if is_url(location):
        require_uploads(location, storage_options)
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

    from ..sample.models import build_model
    from .loop import TrainLoop

    config, source, position, corpus = _prepare(options)
    zstore.init_distributed()
    torch.manual_seed(position.seed)
    with zstore.Init(config=config):
        model = build_model(options.model, position.seq_len)
    engine, *_ = zstore.initialize(model=model, config=config, auto=answers(options, config))
    with engine:
        if options.save is not None:
            engine.note_save_folder(str(options.save))
        if source is not None:
            engine.load_checkpoint(*source)
        TrainLoop(options, engine, corpus, position).run()


_END_WELL_S = 20.0
"""How long ranks may take to exit by themselves once one failed: they exchange their errors meanwhile."""


def launch(command: Sequence[str], num_ranks: int) -> None:
    """Run `command` in `num_ranks` processes of one group, each with the variables that torchrun sets; return when all
    ended well, else raise SystemExit with the code of `zstore run`. None of them outlives this process."""
    ended = run_ranks(RunJob(command=tuple(command), num_ranks=num_ranks, shutdown_timeout_s=_END_WELL_S))
    ended.say()
    if ended.exit_code:
        raise SystemExit(ended.exit_code)
