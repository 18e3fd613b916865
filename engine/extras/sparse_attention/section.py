"""The section `sparse_attention`, which is a pattern too. Loads no torch."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

from ...config.keys import Section, built
from ...config.values import Bool, Count, OneOf, Positive, Words

_Blocks = Annotated[tuple[Count, ...], Words("a list of whole numbers")]
_Sizes = Annotated[tuple[Positive, ...], Words("a list of whole numbers of at least 1")]

ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "dense": {},
    "fixed": {
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "num_different_global_patterns": 1,
        "horizontal_global_attention": False,
    },
    "variable": {
        "num_random_blocks": 0,
        "local_window_blocks": (4,),
        "global_block_indices": (0,),
        "global_block_end_indices": None,
        "horizontal_global_attention": False,
    },
    "bigbird": {"num_random_blocks": 1, "num_sliding_window_blocks": 3, "num_global_blocks": 1},
    "bslongformer": {"num_sliding_window_blocks": 3, "global_block_indices": (0,), "global_block_end_indices": None},
}
"""The arguments of each mode beside those of all, and their defaults, which are DeepSpeed's."""
_OF_ALL = ("mode", "block", "attention", "different_layout_per_head")


class Pattern(Section):
    """Attention in blocks: each token attends to a part of the sequence. Acts on the models of `zstore train` and on those of
    transformers, and by `zstore.attention.attend` in any other; see docs/models.md. An argument of another mode is an
    error."""

    mode: Annotated[Literal["dense", "fixed", "variable", "bigbird", "bslongformer"], OneOf()] = built("fixed")
    """Which blocks attend to which: "dense" all to all, "fixed" local windows and the last blocks of each, "variable" windows
    of given sizes, random blocks and global ones, "bigbird" a sliding window, random blocks and the first ones,
    "bslongformer" a sliding window and global blocks."""
    block: Positive = built(16)
    """Tokens of a block."""
    attention: Annotated[Literal["unidirectional", "bidirectional"], OneOf()] = built("bidirectional")
    """"unidirectional": tokens attend to no later ones; a causal model is so in any case."""
    different_layout_per_head: Bool = built(False)
    """Let heads have layouts of their own: other random blocks, other global blocks of "fixed"."""
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

    @property
    def is_causal(self) -> bool:
        """Whether tokens attend to no later ones."""
        return self.attention == "unidirectional"

    def argument(self, name: str) -> Any:
        """Return an argument of the mode: as given, or its default."""
        given = getattr(self, name)
        return ARGUMENTS[self.mode][name] if given is None else given

    def prepare(self, model: Any) -> None:
        """Let the model's attention follow the pattern. Raises UsageError for a model of another kind."""
        resolve_name(f"{__package__}.attend:apply")(model, self)  # by name: it loads torch, and knows patterns

    def model_post_init(self, context: Any) -> None:
        """Raise ValueError for arguments that do not fit together, of a config or of a script's own pattern."""
        known = (*_OF_ALL, *ARGUMENTS[self.mode])
        for name in self.model_fields_set.difference(known):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not an argument of mode {self.mode}; it has {', '.join(known[1:])}")
        if self.is_causal and self.horizontal_global_attention:
            raise ValueError(
                'horizontal_global_attention needs "attention": "bidirectional": global blocks would attend to later tokens'
            )
        if self.mode == "fixed":
            self._check_windows()
        starts, ends = self.global_block_indices or (0,), self.global_block_end_indices
        if ends is not None and (len(ends) != len(starts) or any(a >= b for a, b in zip(starts, ends, strict=True))):
            raise ValueError(
                f"global_block_end_indices: expected {len(starts)} ends, each after its start in global_block_indices, got "
                f"{list(ends)}"
            )

    def _check_windows(self) -> None:
        local, each, places = (self.argument(name) for name in list(ARGUMENTS["fixed"])[:3])
        if each < 1 or local % each:
            raise ValueError(f"num_local_blocks ({local}) must be a multiple of num_global_blocks ({each})")
        if places > local // each:
            raise ValueError(
                "num_different_global_patterns must be at most num_local_blocks / num_global_blocks = "
                f"{local // each}, got {places}"
            )
        if places > 1 and not self.different_layout_per_head:
            raise ValueError(f"num_different_global_patterns is {places}: set different_layout_per_head to true")
