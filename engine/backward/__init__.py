"""How the backwards of a step come about: those that a script begins itself, and steps that go block by block."""
