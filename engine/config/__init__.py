"""The configuration: strict, frozen data read from the DeepSpeed JSON dialect."""
