# ruff: noqa: F401
"""What every rank of a test is forked with, so that none takes its seconds to import it.

The server that ranks are forked from imports this (conftest.py).
"""

import gc

import hypothesis
import pytest
import torch._dynamo  # torch.optim needs it

import parallelkit.checkpoint
import parallelkit.nn
import parallelkit.testing
import parallelkit.train.picture
import parallelkit.train.run

gc.freeze()  # a collection that looks at all of these takes 0.2 s
