"""Other engines, each behind `open(model) -> serve(workload) -> seconds`, and ratio.py, which runs them beside nva."""
