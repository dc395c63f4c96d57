"""What training reads: text, token shards, random tokens, and data of one's own."""
