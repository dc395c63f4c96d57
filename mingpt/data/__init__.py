"""What training reads: text, token shards, images, synthetic tasks, and data of one's own."""
