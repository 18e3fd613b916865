"""DeepSpeed's API on zstore: `names` lists it, and after `import zstore.as_deepspeed`, `import deepspeed` provides it."""
