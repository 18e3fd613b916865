"""A plugin of pytest that puts Trainers on zstore in the place of transformers' before any test is imported.

`PYTHONPATH=tests/peers python -m pytest -p replacing FOLDER`, since theirs is a package `tests` too; the variable
ZSTORE_CONFIG is the config.
"""

from __future__ import annotations

import transformers
import transformers.trainer
import transformers.trainer_seq2seq

import zstore.hf

transformers.Trainer = transformers.trainer.Trainer = zstore.hf.Trainer
transformers.Seq2SeqTrainer = transformers.trainer_seq2seq.Seq2SeqTrainer = zstore.hf.Seq2SeqTrainer
