"""What a cache of another size, or of another policy, would find: stack distances, and small caches of a sample."""
