"""`zstore generate`: continue a text with a checkpoint's model, token by token."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zstore.errors import UsageError
from zstore.weights.companions import copy_companions

from .opening import Common, open_location
from .options import Dtype, Location, StorageOption, Tag

if TYPE_CHECKING:
    from torch import Tensor, nn

    from zstore.checkpoint import ArraySource


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What the command line says. None: not given."""

    prompt: Annotated[
        str | None, typer.Option(help="The text to continue (default: what stdin has).", metavar="TEXT")
    ] = None
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.", min=1, metavar="N")] = 200
    temperature: Annotated[
        float, typer.Option(help="Flattens (above 1) or sharpens the choice; 0: the likeliest token always.", min=0.0)
    ] = 1.0
    top_k: Annotated[int | None, typer.Option(help="Choose among the K likeliest tokens.", min=1, metavar="K")] = None
    top_p: Annotated[
        float | None,
        typer.Option(help="Choose among the likeliest tokens that together have this probability.", metavar="P"),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the choice; the same one gives the same text.", min=0)] = 0
    dtype: Annotated[
        Dtype | None, typer.Option(help="Type to compute in (default: the run's precision).", show_default=False)
    ] = None
    device: Annotated[str, typer.Option(help="Device to compute on, as cpu or cuda:0.")] = "cpu"
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the model's config.json and tokenizer (extra hf; default: what lies beside the checkpoint).",
            metavar="FOLDER",
            exists=True,
            file_okay=False,
        ),
    ] = None
    storage_option: StorageOption = None

    def __post_init__(self) -> None:
        """Refuse what is no probability."""
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p: expected a probability above 0 and up to 1, got {self.top_p:g}")


def generate_command(ckpt: Location, options: GenerateOptions, tag: Tag = None) -> None:
    """Print the continuation as it is made, and a line's end; the prompt is not repeated.

    In memory are the model in the type that it computes in, and a few tens of MiB to read it with.
    """
    import torch

    from .sample.speaking import speaker_of

    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    device = _device(options.device)
    common = Common(storage_option=options.storage_option)
    with open_location(ckpt, common, tag) as source, tempfile.TemporaryDirectory() as beside:
        folder = options.model
        if folder is None:
            copy_companions(source, Path(beside), beside=True)
            folder = Path(beside) if (Path(beside) / "config.json").is_file() else None
        model = _load(source, folder, _precision(source, options.dtype)).to(device)
        speaker = speaker_of(model, folder)
    model.eval()
    ids = torch.tensor([speaker.encode(prompt)], device=device)
    with torch.no_grad():
        for text in speaker.texts(_tokens(model, ids, options)):
            print(text, end="", flush=True)
    print()


def _device(name: str) -> Any:
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: torch cannot use it: {str(error).splitlines()[0]}") from error
    return device


def _precision(source: ArraySource, asked: Dtype | None) -> str:
    """Return the name of the type to compute in."""
    if asked is not None:
        return str(asked)
    engine = source.record.state.get("engine", {})
    precision = engine.get("precision") if isinstance(engine, dict) else None
    return precision if precision in ("fp16", "bf16", "fp32") else "fp32"


def _load(source: ArraySource, folder: Path | None, precision: str) -> nn.Module:
    """Return the checkpoint's model, in host memory: a transformers model of the config in `folder`, else the shipped
    one that its weights are of."""
    from zstore.engine.params.tensors import PRECISIONS

    from .sample.loading import fill, shipped_of, transformers_model

    dtype = PRECISIONS[precision]
    model = shipped_of(source, dtype) if folder is None else transformers_model(folder, dtype)
    fill(model, source)
    return model


def _tokens(model: nn.Module, ids: Tensor, options: GenerateOptions) -> Iterator[int]:
    """Yield the new tokens after `ids` [1, tokens]."""
    import torch

    from .sample.models import Gpt

    generator = torch.Generator(ids.device).manual_seed(options.seed)
    past: Any = None
    fed = ids
    for _ in range(options.max_new_tokens):
        if isinstance(model, Gpt):
            logits = model(ids[:, -model.config.max_positions :])
        else:
            out = model(input_ids=fed, past_key_values=past, use_cache=True)
            logits, past = out.logits, out.past_key_values
        chosen = _choose(logits[0, -1].float(), options, generator)
        fed = chosen.view(1, 1)
        if isinstance(model, Gpt):
            ids = torch.cat([ids, fed], dim=1)
        yield int(chosen)


def _choose(logits: Tensor, options: GenerateOptions, generator: Any) -> Tensor:
    """Return the next token by its `logits` [vocabulary]."""
    import torch

    if options.temperature == 0:
        return logits.argmax()
    logits = logits / options.temperature
    if options.top_k is not None and options.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(options.top_k).values[-1], -torch.inf)
    probabilities = logits.softmax(-1)
    if options.top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        # The first is always in: before it there is nothing.
        kept = ordered.cumsum(-1) - ordered < options.top_p
        probabilities = torch.zeros_like(probabilities).scatter(0, order[kept], ordered[kept])
    return torch.multinomial(probabilities, 1, generator=generator)[0]
