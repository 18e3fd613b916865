"""The journal of a run: its events, a JSON object a line, beside its checkpoints. No torch.

[Note: the journal]
`journal-<run_id>.jsonl` in the folder of checkpoints, written by rank 0 alone and only at its end. A last line without its
newline was cut off when the process was killed: readers drop it, a writer that resumes cuts it off. Each line has
`kind` and `at` (seconds since 1970). Readers pass over kinds and keys that they do not know. Bytes are bytes, names that end
in `_s` are seconds. A value that is not known, or is not a finite number, is null or missing; of the latter `not_finite`
says by key what they were (nan, inf, -inf).

start    one process begins or resumes: `version` (1), `run`, `step`, `total_steps`, `loop` (engine, train, trainer,
         lightning, accelerate, offloaded), `world_size`, `host`, `pid`, `pid_namespace`, `versions` (by package), `device`,
         `parameters`, `config`
plan     once after a start: `host_budget_bytes`, `device_bytes`, `parts` (list of `tier`, `kind`, `planned_bytes`,
         `measured_bytes`), `arrays` (list of [name, tier, kind, bytes], on rank 0)
step     `step`, `loss`, `lr`, `grad_norm`, `samples` and `tokens` (of this step, all over all ranks), `skipped`, `step_s` (from
         the end of the step before, without evaluations), `forward_s`, `backward_s`, `optimizer_s`, `mfu` (0 to 1); and every
         two seconds at most, counted from the step that had them before: `links` (by name: `bytes`, `busy_s`, `stall_s` by
         cause), `links_s`, `links_steps` (the seconds and steps that they are of); `memory` (bytes of `device`, `host`, `disk`,
         `buffers`, `process`, `cuda`); the inputs of `mfu`, at the first step and when it changes: `flops` (`step_flops`,
         operations of a step over all ranks, `source`, `peak_flops`, operations a second of rank 0's device, `peak_source`)
save     `step`, `tag`, `location`, `state` (begun, committed, uploaded, failed), `stall_s`, `elapsed_s`, `linked_bytes`,
         `written_bytes` (of all ranks), `uploaded_bytes`, `problem`
eval     `step`, `loss` (mean over all samples), `perplexity`, `samples`
metrics  `step`, `values`: numbers of the loop's own, by name
load     `step`, `tag`, `location`, `elapsed_s`, `read_bytes`
action   `action` (save, stop), `id`: a request was carried out; with `problem` it was refused
warning  `text`
end      `step`, `reason` (done, stopped, failed), `problem` (the error, of a run that failed)

A resumed run continues the same file, and repeats the steps since the checkpoint: the later ones count, see
[Note: repeated steps] in `columns`.
"""

from .columns import last_steps, steps
from .reader import journals, read, read_file, read_from

__all__ = ["journals", "last_steps", "read", "read_file", "read_from", "steps"]
