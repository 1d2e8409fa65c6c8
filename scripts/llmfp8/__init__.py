"""What scripts/, data/ and dev/ share: token shards, logs of runs, comparisons, other trainers' configurations."""
