"""What the experiments feed to caches and engines: traces and lengths, models, arrivals."""
