"""Weights as safetensors files in the Hugging Face layout, in bounded memory. Imports no torch.

Read in this order: layout, cast, file, writer; then choose, parts, from_checkpoint; and companions.
"""
