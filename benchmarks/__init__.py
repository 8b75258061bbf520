"""Measurements of speed and memory: ``python -m benchmarks``. See ``docs/performance.md``."""
