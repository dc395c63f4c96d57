"""What mingpt.preflight looks at on each node, and between them, before training starts."""
