"""Strings on both ends of the engine: prompts and images in, text out."""

from nva.text.prompts import encode, load_tokenizer

__all__ = ["encode", "load_tokenizer"]
