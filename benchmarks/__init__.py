"""Measurements, never assertions: each runs as `python -m benchmarks.NAME [--quick] [--json]`.

Ratios come from pairs measured in turn in one run, since the machines these run on drift.
"""
