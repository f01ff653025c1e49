"""Ops at real sizes, checked and timed."""
