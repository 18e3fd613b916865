"""Block-sparse attention: the patterns of DeepSpeed's `sparse_attention` section, their masks, and attention under them.

`attend` is attention under a pattern, for any module; `apply` gives a pattern to the attention of a whole model;
`block_mask` makes a pattern's mask for `torch.nn.attention.flex_attention`.
"""

from zstore.engine.extras.sparse_attention.attend import attend, block_mask, dense_mask
from zstore.engine.extras.sparse_attention.models import TakesAttention, apply
from zstore.engine.extras.sparse_attention.patterns import BigBird, BSLongformer, Dense, Fixed, Pattern, Variable

__all__ = [
    "BSLongformer",
    "BigBird",
    "Dense",
    "Fixed",
    "Pattern",
    "TakesAttention",
    "Variable",
    "apply",
    "attend",
    "block_mask",
    "dense_mask",
]
