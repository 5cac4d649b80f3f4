"""Immutable records of the engine.

Nothing here computes a decision or names torch: steps/ decides over these records."""
