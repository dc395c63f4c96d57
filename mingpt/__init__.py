"""A GPT trainer whose result does not depend on the machines: kill it, move it, resize it, get the same bits."""

__version__ = "0.2.0"
# Increase it with each change of this package that changes bits: the order of samples, the tree, clipping, the update,
# initial weights, dropout. The golden values in tests/compute/test_numerics.py fail at such a change.
NUMERICS = 3
TORCH = (2, 15)  # the newest that the tests have run with: make test-torch
