"""DeepSpeed's names on zstore: `names` lists them, and after `import zstore.as_deepspeed`, `import deepspeed` gives them."""
