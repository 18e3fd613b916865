"""A compact ZeRO training engine on top of the tensor store."""
