"""The one lock under which transformers is imported, and what is read with it.

transformers fills its modules when a name is first asked of them. Two threads that ask at once can
meet a module half made, and the ImportError names what is there. Read next: prompts.py and
images.py, which import under it."""

from __future__ import annotations

from nva.host.forks import lock_across_forks

IMPORTS = lock_across_forks()
"""Held by whoever imports from transformers, and while it loads a tokenizer or a processor, which
imports more of it."""
