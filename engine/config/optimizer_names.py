"""For an optimizer that cannot be named in a config, what can be done in its place."""

_PASS = "to initialize(optimizer=...) and leave this section out"
_WHOLE = f"pass the object {_PASS}; it works at stage 0 without offload only, for its update needs whole tensors"
_ONE_BIT = "the 1-bit optimizers, which compress what ranks send, are not built"

# Those that `kernel.ELEMENT_WISE` lists.
_ELEMENT_WISE = ("SGD", "Adagrad", "RMSprop", "NAdam", "Adamax", "RAdam", "Adadelta", "ASGD", "Rprop")

_OTHERS = {
    **{
        name.lower(): f"pass torch.optim.{name}(...) {_PASS}; it works at every stage and tier"
        for name in _ELEMENT_WISE
    },
    **dict.fromkeys(("fusedadam", "cpuadam", "deepspeedcpuadam"), 'write "Adam": there is one update on every device'),
    **dict.fromkeys(("onebitadam", "zerooneadam"), f'{_ONE_BIT}; write "Adam"'),
    "onebitlamb": f"{_ONE_BIT}, and torch has no LAMB either; take one of another package and {_WHOLE}",
    **dict.fromkeys(("lamb", "fusedlamb"), f"torch has no LAMB; take one of another package and {_WHOLE}"),
    "lion": "torch has no Lion; take one of another package and "
    f"pass the object {_PASS}; it works at stage 0 without offload only, since its update is not known here",
    "muon": f"take torch.optim.Muon, where all trained parameters are matrices, and {_WHOLE}",
    "adafactor": f"take torch.optim.Adafactor and {_WHOLE}",
    "lbfgs": "it calls the model again within its step, which the engine cannot do; train with it in plain torch",
    "sparseadam": "it needs sparse gradients, which are not supported",
}


def advice_on(name: object) -> str:
    """Return the end of the message about an optimizer that is neither "Adam" nor "AdamW"."""
    known = _OTHERS.get(name.lower()) if isinstance(name, str) else None
    return "; " + (
        known
        or f"pass an optimizer {_PASS}: torch's {', '.join(_ELEMENT_WISE)} work at every stage and tier, any other at "
        "stage 0 without offload"
    )
