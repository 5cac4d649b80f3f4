"""From a model's name to an Engine that can serve."""
