"""Token sequences for training, and the real corpora to make them from."""
