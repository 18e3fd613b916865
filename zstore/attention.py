"""Block-sparse attention: the patterns of DeepSpeed's section `sparse_attention`.

`attend` is attention under a pattern, for any module; `apply` gives a pattern to the attention of a whole model;
`block_mask` makes a pattern's mask for `torch.nn.attention.flex_attention`.
"""

from zstore.engine.extras.sparse_attention.attend import apply, attend, block_mask, dense_mask, pattern_of
from zstore.engine.extras.sparse_attention.section import Pattern

__all__ = ["Pattern", "apply", "attend", "block_mask", "dense_mask", "pattern_of"]
