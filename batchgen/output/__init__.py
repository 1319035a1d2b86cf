"""What a job writes: schema, journal, shards, manifest, metrics and card, in a locked folder."""
