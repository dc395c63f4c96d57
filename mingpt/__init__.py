"""A GPT trainer whose result does not depend on the machines: kill it, move it, resize it, get the same bits."""

__version__ = "0.1.0"
