"""The engine's configuration: the DeepSpeed JSON dialect and zstore's own settings, checked, typed and frozen.

`load_config(source)` reads and checks, `Config.notices` names each key that has no effect, `Config.resolve(context)`
fills in "auto" and the batch sizes; the engine reads the properties of the resolved config. The keys are in `sections`
and `optimizers`.
"""
