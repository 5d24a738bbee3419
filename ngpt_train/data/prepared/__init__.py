"""Text to token shards on disk, and shards as one sequence of ids."""
