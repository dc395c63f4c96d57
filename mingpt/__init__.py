"""A GPT trainer whose result does not depend on the machines: kill it, move it, resize it, get the same bits."""

__version__ = "0.1.0"
# Raise it with each change of this package after which the same config gives other bits: the order of samples, the
# tree, the clip, the update, the first weights, dropout. tests/test_numerics.py fails at such a change without it.
NUMERICS = 1
