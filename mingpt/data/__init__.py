"""What training reads: text, token shards, synthetic tasks, and data of one's own."""
