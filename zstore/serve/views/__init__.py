"""What answers are made of: journals, checkpoints, arrays and differences as models. No HTTP."""
