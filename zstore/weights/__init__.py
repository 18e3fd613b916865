"""Weights as safetensors files in the Hugging Face layout, in bounded memory. Imports no torch.

Read in this order: cast, files; then from_checkpoint, parts; and companions.
"""
