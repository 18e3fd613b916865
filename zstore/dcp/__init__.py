"""zstore's format for torch.distributed.checkpoint: `Writer` for `save` and `async_save`, `Reader` for `load`.

    torch.distributed.checkpoint.save(state_dict, storage_writer=zstore.dcp.Writer("ckpt/step-100"))
    torch.distributed.checkpoint.load(state_dict, storage_reader=zstore.dcp.Reader("ckpt/step-100"))

`docs/dcp.md` describes the mapping of names. Read in this order: save, writer, reader.
"""

from .reader import Reader
from .writer import Writer

__all__ = ["Reader", "Writer"]
