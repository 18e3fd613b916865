"""The section `sparse_attention`."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import model_validator

from zstore.errors import ConfigError

from ...config.keys import Section, built
from ...config.values import Bool, Count, OneOf, Positive, Words

if TYPE_CHECKING:
    from .patterns import Pattern

_Blocks = Annotated[list[Count], Words("a list of whole numbers")]
_Sizes = Annotated[list[Positive], Words("a list of whole numbers of at least 1")]


class SparseAttentionSection(Section):
    """Attention in blocks: each token attends to a part of the sequence. Acts on the models of `zstore train` and on those of
    transformers, and by `zstore.attention.attend` in any other; see docs/models.md. An argument of another mode is an
    error."""

    mode: Annotated[Literal["dense", "fixed", "variable", "bigbird", "bslongformer"], OneOf()] = built("fixed")
    """Which blocks attend to which: "dense" all to all, "fixed" local windows and the last blocks of each, "variable" windows
    of given sizes, random blocks and global ones, "bigbird" a sliding window, random blocks and the first ones,
    "bslongformer" a sliding window and global blocks."""
    block: Positive | None = built(None)
    """Tokens of a block. Unset: 16. Larger ones are computed faster."""
    attention: Annotated[Literal["unidirectional", "bidirectional"], OneOf()] | None = built(None)
    """"unidirectional": tokens attend to no later ones; a causal model is so in any case. Unset: "bidirectional"."""
    different_layout_per_head: Bool | None = built(None)
    """Let heads have layouts of their own: other random blocks, other global blocks of "fixed". Unset: false."""
    num_local_blocks: Positive | None = built(None)
    """Blocks of a window of "fixed". Unset: 4."""
    num_global_blocks: Count | None = built(None)
    """Global blocks: of "fixed" the last of each window, of "bigbird" the first of the sequence. Unset: 1."""
    num_different_global_patterns: Positive | None = built(None)
    """Places of the global blocks in a window of "fixed", over which heads are spread. Unset: 1."""
    horizontal_global_attention: Bool | None = built(None)
    """Let global blocks of "fixed" and "variable" attend to all blocks too. Unset: false."""
    num_random_blocks: Count | None = built(None)
    """Random blocks that a block attends to, the same on every rank and in every run. Unset: 0 for "variable", 1 for
    "bigbird"."""
    local_window_blocks: _Sizes | None = built(None)
    """Sizes of the windows of "variable" in blocks; the last repeats. Unset: [4]."""
    num_sliding_window_blocks: Positive | None = built(None)
    """Width of the window of "bigbird" and "bslongformer" in blocks. Unset: 3."""
    global_block_indices: _Blocks | None = built(None)
    """Global blocks of "variable" and "bslongformer". Unset: [0]."""
    global_block_end_indices: _Blocks | None = built(None)
    """Ends of ranges of global blocks, which begin at `global_block_indices`. Unset: each range is one block."""

    def pattern(self) -> "Pattern":
        """Return the pattern that the section describes."""
        from .patterns import pattern_of  # loads torch

        given = {name: value for name, value in self.model_dump(exclude={"mode"}).items() if value is not None}
        return pattern_of(self.mode, **given)

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        try:
            self.pattern()
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("sparse_attention: ")) from error
        return self
