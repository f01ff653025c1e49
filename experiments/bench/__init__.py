"""Ops at real sizes, checked and timed, and datasheet rates of GPUs."""
