"""Weights as safetensors files in the Hugging Face layout, in bounded memory. Imports no torch.

Read in this order: cast, files, from_checkpoint.
"""
