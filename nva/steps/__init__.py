"""Pure steps over the records of state/: each takes a state and gives back the next one with a
result."""
