"""Request traces: the format, its files, converters and synthetic workloads."""
