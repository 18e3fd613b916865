#!/usr/bin/env bash
# The main job, end to end: train on disk with 2 processes, resume on 1 in memory, reshard, verify, consolidate.
#
#   examples/demo.sh [FOLDER]      an existing FOLDER (demo-run) is replaced
#
# `make demo` runs it. Every step is a `zstore` command as a user would type it; nothing is downloaded.
set -euo pipefail
folder=${1:-demo-run} model=gpt-tiny steps=40 middle=20
# A model as small as this gains little from torch's threads, which mostly wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

say() { printf '\n== %s\n' "$1"; }
run() { echo "\$ zstore$(printf ' %q' "$@")"; zstore "$@"; }
config() { # NAME ZERO: write a config with this section zero_optimization
    cat > "$folder/$1.json" << END
{
  "train_batch_size": 16,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": 4e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 4e-3, "warmup_num_steps": 10}},
  "zero_optimization": $2
}
END
}

rm -rf "$folder" && mkdir -p "$folder/nvme"
config zero3-disk "{\"stage\": 3, \"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": \"$(realpath "$folder")/nvme\"}}"
config zero1-memory '{"stage": 1}'

say "Train $model for $steps steps on 2 processes: ZeRO-3, optimizer state on disk"
run train --config "$folder/zero3-disk.json" --model $model --steps $steps --save "$folder/run" --save-every $middle \
    --nproc 2 --seed 7 --metrics "$folder/first.jsonl"
say "Resume step $middle on 1 process: ZeRO-1, optimizer state in memory"
run train --config "$folder/zero1-memory.json" --model $model --steps $steps --save "$folder/run-1" \
    --resume "$folder/run@step-$(printf %08d $middle)" --metrics "$folder/second.jsonl"
say "Reshard the newest checkpoint for 4 ranks, and verify every chunk"
run reshard "$folder/run" "$folder/run-4" --world-size 4
run verify "$folder/run-4"
say "Consolidate to fp16 weights that other software loads"
run consolidate "$folder/run" "$folder/weights" --dtype fp16

say "Load the weights into a plain torch model and generate text"
python - "$folder" $model << 'END'
import json, sys, torch
from pathlib import Path
from safetensors.torch import load_file
from zstore.tools.sample import build_model

folder = Path(sys.argv[1])
model = build_model(sys.argv[2], 128).eval()
weights = {name: weight.float() for name, weight in load_file(folder / "weights/model.safetensors").items()}
missing, unexpected = model.load_state_dict(weights, strict=False)  # a tied head is stored once
assert not unexpected and all("lm_head" in name for name in missing), (missing, unexpected)
prompt, generator = torch.tensor([list(b"def ")]), torch.Generator().manual_seed(1)
text = model.generate(prompt, max_new_tokens=200, temperature=0.8, generator=generator)
print(bytes(text[0].tolist()).decode("utf-8", errors="replace"))

first, second = (
    {row["step"]: row["loss"] for row in map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())}
    for name in ("first", "second")
)
apart = max(abs(first[step] - loss) for step, loss in second.items())
losses = list(first.values())
print(f"\n== Results\nloss, first step and last: {losses[0]:.3f} -> {losses[-1]:.3f}")
print(f"largest difference of the resumed run's loss: {apart:.5f} (at most 0.02)")
sys.exit(not apart <= 0.02)  # nor may it be NaN
END

zstore=$(command -v zstore) && zstore=${zstore#"$PWD"/}
folder=$(printf %q "$folder")
cat << END
time: $SECONDS s

What to type next:
  $zstore serve $folder  # a page that shows the runs, their checkpoints and arrays (extra \`serve\`)
  $zstore ls $folder/run  # the checkpoints, and what they share
  $zstore inspect $folder/run  # the arrays: shape, bytes, shards
  $zstore diff $folder/run/step-00000020 $folder/run/step-00000040  # what the last 20 steps changed
  $zstore train --config $folder/zero1-memory.json --model $model --steps 60 --save $folder/run-1 --resume auto  # continue training
  $zstore doctor --path $folder  # what this machine and its drive can do
  $zstore plan --model gpt-base  # how a larger model's training fits on this machine
END
