"""Block-sparse attention: the patterns of DeepSpeed's section `sparse_attention`.

`attend` is attention under a pattern, for any module; `apply` gives a pattern to the attention of a whole model;
`block_mask` makes a pattern's mask for `torch.nn.attention.flex_attention`.
"""

from zstore.engine.extras.sections import Pattern
from zstore.engine.extras.sparse_attention import apply, attend, block_mask, dense_mask, pattern_of

__all__ = ["Pattern", "apply", "attend", "block_mask", "dense_mask", "pattern_of"]
