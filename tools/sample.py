"""Text and models for `zstore train`, without downloads: files read as bytes; three byte-level GPTs in plain torch, and
transformers' causal language models from a config.

All models are called as in transformers: `model(input_ids=..., labels=...)` with `labels` equal to `input_ids`; the model
compares each prediction with the next token.

[Note: sample order] Sample n of a run with seed s starts at the same byte regardless of the number of ranks and of resumes:
the start is a hash of (s, n), taken from the raw output of numpy's counter-based Philox generator (which, unlike numpy's
distributions, is the same in every numpy version).
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zstore.errors import ConfigError

BYTE_VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """Shape of a GPT; `hidden` must be a multiple of `num_heads`."""

    hidden: int
    """Width of the residual stream, in elements."""
    num_layers: int
    num_heads: int
    vocab_size: int = BYTE_VOCABULARY
    max_positions: int = 1024
    """Maximum sequence length in tokens: rows of the position embedding."""


BUILT_IN_MODELS = {
    "gpt-tiny": GptConfig(hidden=128, num_layers=4, num_heads=4),
    "gpt-small": GptConfig(hidden=320, num_layers=8, num_heads=5),
    "gpt-base": GptConfig(hidden=864, num_layers=12, num_heads=12),
}
"""About 1, 10 and 109 million parameters."""


class Attention(nn.Module):
    """Causal self-attention; query, key and value come from one fused projection."""

    attend: Callable[..., Tensor] = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.c_attn = nn.Linear(config.hidden, 3 * config.hidden)
        self.c_proj = nn.Linear(config.hidden, config.hidden)

    def use_attention(self, attend: Callable[..., Tensor]) -> None:
        """Use `attend(query, key, value, is_causal=True)` for attention; called by `sparse_attention`."""
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        batch, tokens, hidden = x.shape
        heads = self.c_attn(x).view(batch, tokens, 3, self.num_heads, -1)  # [batch, tokens, 3, heads, head_dim]
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        output = self.attend(query, key, value, is_causal=True)  # [batch, heads, tokens, head_dim]
        projected: Tensor = self.c_proj(output.transpose(1, 2).reshape(batch, tokens, hidden))
        return projected


class Mlp(nn.Module):
    """Two projections with a GELU in between, where the width is four times as large."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden, 4 * config.hidden)
        self.c_proj = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        projected: Tensor = self.c_proj(F.gelu(self.c_fc(x)))
        return projected


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        x = x + self.attn(self.ln_1(x))
        output: Tensor = x + self.mlp(self.ln_2(x))
        return output


class Transformer(nn.Module):
    """Embeddings, blocks and the final norm, with GPT-2's names."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden)
        self.wpe = nn.Embedding(config.max_positions, config.hidden)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[batch, tokens] int64 -> [batch, tokens, hidden]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        normed: Tensor = self.ln_f(x)
        return normed


class Gpt(nn.Module):
    """A GPT whose output head is tied to its token embedding; weights are drawn from torch's global generator."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self._initialize()
        self.lm_head.weight = self.transformer.wte.weight

    def _initialize(self) -> None:
        # Every residual branch adds variance, so projections into the residual stream start smaller.
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.transformer.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=residual_std if name.endswith("c_proj.weight") else 0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits [batch, tokens, vocab_size], or with `labels` [batch, tokens] the mean loss as an fp32 scalar.

        `labels` are the tokens at the positions of `input_ids`; the model shifts them by one.
        """
        logits: Tensor = self.lm_head(self.transformer(input_ids))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return `prompt_ids` [batch, tokens] followed by `max_new_tokens` sampled tokens (temperature 0: the likeliest)."""
        ids = prompt_ids
        for _ in range(max_new_tokens):
            logits = self(ids[:, -self.config.max_positions :])[:, -1].float()  # [batch, vocab_size]
            if temperature == 0:
                next_ids = logits.argmax(-1, keepdim=True)
            else:
                next_ids = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, next_ids], dim=1)
        return ids


def build_model(name_or_path: str, seq_len: int) -> nn.Module:
    """Return an fp32 model with random weights for sequences of `seq_len` tokens.

    `name_or_path` is one of `BUILT_IN_MODELS`, or the path of a transformers `config.json` or its folder (extra `hf`).
    Raises `ConfigError` if it is neither, if transformers is not installed, or if the model cannot process bytes or
    `seq_len` tokens.
    """
    shipped = BUILT_IN_MODELS.get(name_or_path)
    if shipped is not None:
        return Gpt(replace(shipped, max_positions=max(shipped.max_positions, seq_len)))
    path = Path(name_or_path).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"unknown model {name_or_path!r}: expected one of {', '.join(BUILT_IN_MODELS)}, or the path of a transformers "
            "config.json or of its folder"
        )
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(f"{path} needs transformers, which is not installed: pip install 'zstore[hf]'") from error
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"transformers cannot build a causal language model from {path}: {error}") from error
    for name, needed in (("vocab_size", BYTE_VOCABULARY), ("max_position_embeddings", seq_len)):
        if (limit := getattr(config, name, None) or needed) < needed:
            raise ConfigError(
                f"{path}: {name} is {limit}, but text is read as bytes in sequences of {seq_len}, which needs {needed}"
            )
    return model.float()


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Create models on the meta device within this context."""
    with torch.device("meta"), _SkipInit():
        yield


class _SkipInit(TorchFunctionMode):
    """Skips random initialization of meta tensors, for which torch would import its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "normal_":
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Concatenated files. Only their sizes are kept in memory; the bytes of a sample are read on demand."""

    files: tuple[Path, ...]
    ends: tuple[int, ...]
    """End of each file, in bytes from the start of the corpus."""
    name: str
    """For messages: the given path, or the name of the default."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the text; each byte is a token."""
        return self.ends[-1]

    def require_length(self, seq_len: int) -> None:
        """Raise `ConfigError` unless the text is long enough for a sample of `seq_len` tokens."""
        if self.num_bytes < seq_len:
            raise ConfigError(
                f"{self.name} has {self.num_bytes} bytes, but one sample takes {seq_len}: "
                "provide more text or a smaller --seq-len"
            )

    def sample(self, number: int, seq_len: int, seed: int) -> Tensor:
        """Return sample `number`, int64 [seq_len], which is also its labels. See [Note: sample order]."""
        self.require_length(seq_len)
        key = np.array([seed % 2**64, number % 2**64], dtype=np.uint64)
        start = int(np.random.Philox(key=key).random_raw()) * (self.num_bytes - seq_len + 1) >> 64
        return torch.from_numpy(np.frombuffer(self.read(start, seq_len), dtype=np.uint8).astype(np.int64))

    def batch(self, numbers: Sequence[int], seq_len: int, seed: int) -> Tensor:
        """Return the samples of `numbers`, int64 [len(numbers), seq_len]."""
        return torch.stack([self.sample(number, seq_len, seed) for number in numbers])

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes from `start`, across files. Raises ConfigError if a file was truncated."""
        pieces = []
        index = bisect.bisect_right(self.ends, start)
        while num_bytes > 0:
            begin = self.ends[index - 1] if index else 0
            num_read = min(num_bytes, self.ends[index] - start)
            with self.files[index].open("rb", buffering=0) as stream:
                stream.seek(start - begin)
                pieces.append(stream.read(num_read))
            if len(pieces[-1]) != num_read:
                raise ConfigError(f"{self.files[index]}: the file changed while it was being read")
            start += num_read
            num_bytes -= num_read
            index += 1
        return b"".join(pieces)


def open_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
    """Return the text file at `path`, or all files in the folder `path` and its subfolders, sorted, except hidden ones.

    The default is the single-file modules of Python's standard library. Raises ConfigError if the path is missing, cannot be
    read, or has no text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else Path(path).expanduser()
    name = f"the standard library ({root})" if path is None else str(root)
    if not root.exists():
        raise ConfigError(f"expected a text file or a folder of them, but {root} does not exist: check --data")
    if root.suffix in (".jsonl", ".ndjson", ".parquet", ".arrow"):
        raise ConfigError(f"{root}: expected plain text, got a file of records: write their text to a separate file")
    candidates = sorted(root.glob("*.py" if path is None else "**/*")) if root.is_dir() else [root]
    visible = (file for file in candidates if not any(part.startswith(".") for part in file.relative_to(root).parts))
    files = [file for file in visible if file.is_file()]
    try:
        sizes = [file.stat().st_size for file in files]
        for file in files:
            with file.open("rb"):
                pass
    except OSError as error:
        raise ConfigError(f"the text in {name} cannot be read: {error}") from error
    if not sum(sizes):
        raise ConfigError(f"{name} has no text ({len(files)} files, 0 bytes): pass a file or folder with text in it")
    return Corpus(files=tuple(files), ends=tuple(itertools.accumulate(sizes)), name=name)
