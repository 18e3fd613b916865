"""The ZeRO core: collectives, gathering of units, gradients and their norm."""
