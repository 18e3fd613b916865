"""The journal of a run: its events, a JSON object a line, beside its checkpoints. No torch.

[Note: the journal]
`journal-<run_id>.jsonl` in the folder of checkpoints, written by rank 0 alone and only at its end. A last line without its
newline was cut off when the process was killed: readers drop it, a writer that resumes cuts it off. docs/journal.md has the
lines by kind. Readers pass over kinds and keys that they do not know.

A resumed run continues the same file, and repeats the steps since the checkpoint: the later ones count, see
[Note: repeated steps] in `columns`.
"""

from .columns import last_steps, steps
from .reader import Follower, journals, read, read_file, read_from

__all__ = ["Follower", "journals", "last_steps", "read", "read_file", "read_from", "steps"]
