"""Strings on both ends of the engine: prompts and images in, text out."""
