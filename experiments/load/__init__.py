"""Inputs of experiments on caches and engines: traces and lengths, models, arrivals."""
