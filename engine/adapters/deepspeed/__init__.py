"""DeepSpeed's names, answered by zstore: `names` lists them, and `zstore.as_deepspeed` lets `import deepspeed` give them."""
