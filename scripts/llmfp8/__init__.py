"""Shared by scripts/, data/ and dev/: token shards, logs of runs, comparisons, other trainers' configurations."""
