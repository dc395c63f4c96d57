"""A GPT trainer whose result does not depend on the machines: kill it, move it, resize it, the same weights bit for bit."""

__version__ = "0.1.0"
