"""Benchmarks: one small file for each question, run as `python -m bench.NAME`; nva/bench.py is what
they share."""
