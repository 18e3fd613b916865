"""The content of answers: journals, checkpoints, arrays and differences as models. No HTTP."""
