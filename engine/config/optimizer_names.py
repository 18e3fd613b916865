"""Other names of optimizers, and a substitute for each that cannot be named in a config."""

_PASS = "to initialize(optimizer=...) and leave this section out"
_WHOLE = f"pass the object {_PASS}; it works at stage 0 without offload only, for its update needs whole tensors"

ALIASES = {
    **dict.fromkeys(("fusedadam", "cpuadam", "deepspeedcpuadam"), "Adam"),
    **dict.fromkeys(("cpuadagrad", "deepspeedcpuadagrad"), "Adagrad"),
    **dict.fromkeys(("fusedlion", "cpulion", "deepspeedcpulion"), "Lion"),
    "fusedlamb": "Lamb",
}
"""Names of DeepSpeed's classes, in small letters, and the type that does the same."""

_OTHERS = {
    "lbfgs": "it calls the model again within its step, which the engine cannot do; train with it in plain torch",
    "sparseadam": "it needs sparse gradients, which are not supported",
}


def advice_on(name: object) -> str:
    """Return the end of the message about an optimizer that cannot be named."""
    known = _OTHERS.get(name.lower()) if isinstance(name, str) else None
    return "; " + (known or f"of another {_WHOLE}")
