"""`mingpt preflight`: checks of each node, and of the links between nodes, before training starts."""
