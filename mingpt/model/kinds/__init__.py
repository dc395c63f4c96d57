"""One module for each kind of model: see config/kinds.py."""
