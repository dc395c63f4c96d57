"""One module for each kind of data: see config/kinds.py."""
