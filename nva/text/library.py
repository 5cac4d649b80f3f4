"""The one lock under which transformers is imported, and what is read with it.

transformers fills its modules when a name is first asked of them. Two threads that ask at once can
meet a module half made, and get an ImportError for a name that is there. Read next: prompts.py and
images.py, which import under it."""

from __future__ import annotations

import threading

IMPORTS = threading.RLock()
"""Held by whoever imports from transformers, and while it loads a tokenizer or a processor, which
imports more of it."""
