"""Restartable trajectory jobs: one input file, one folder of output."""
