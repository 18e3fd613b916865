"""The code of `docs/trainer.md` and the examples run as they are printed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.integrations.trainers import VOCAB, Texts
from tests.tools.commands import run_here
from zstore.testing.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": VOCAB}
