"""Prompts to token ids: text, ids or messages in, ids out, by the checkpoint's own tokenizer.

The law: what a prompt says is encoded, or it is refused.
Read next: chat.py for messages, images.py for images, detokenize.py for the way back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nva.state.checks import is_whole
from nva.text.chat import Tokenizer, check_text, encode_messages

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"messages": [{"role": ..., "content": ...}, ...]}; see chat.py for what else
it may have."""

PROMPT_FORMS = 'a str, a list of token ids, or {"messages": [{"role": ..., "content": ...}, ...]}'

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The checkpoint's tokenizer, from its own files and without running code of theirs; None if it
    has no such files.

    Raises ValueError if it has, but no tokenizer can be made from them.
    """
    if not any((Path(folder) / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        return _tokenizer_class(Path(folder)).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # for a bad file the tokenizers library raises a bare Exception
        raise ValueError(f"no tokenizer can be made from the files in {folder}: {error}") from error


def _tokenizer_class(folder: Path) -> Any:
    """What loads a checkpoint's tokenizer: the general class where the files name it, as importing
    AutoTokenizer, which would choose the same, takes a second longer."""
    config = folder / "tokenizer_config.json"
    name = (
        json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class")
        if config.is_file()
        else None
    )
    if (
        name in ("PreTrainedTokenizerFast", "TokenizersBackend")
        and (folder / "tokenizer.json").is_file()
    ):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def encode(tokenizer: Tokenizer | None, prompt: Prompt) -> list[int]:
    """Token ids of a prompt. A str gets the special tokens its tokenizer adds, messages those of
    the chat template.

    Raises ValueError for a prompt that is empty or of another form, and for one that the checkpoint
    can't encode."""
    if isinstance(prompt, str):
        ids = encode_text(tokenizer, prompt)
    elif isinstance(prompt, Mapping):
        ids = encode_messages(tokenizer, prompt)
    else:
        ids = check_ids(prompt)
    if not ids:
        raise ValueError(f"the prompt is empty: {prompt!r:.80}; give at least one token")
    return ids


def encode_text(tokenizer: Tokenizer | None, text: str) -> list[int]:
    """Token ids of a text, with the special tokens that the tokenizer adds; of no text none at
    all."""
    if tokenizer is None:
        raise ValueError(f"the checkpoint has no tokenizer to encode {text!r:.80}; give token ids")
    return list(tokenizer.encode(check_text(text))) if text else []


def check_ids(prompt: object) -> list[int]:
    """A prompt that is neither text nor messages, as a list of ids. Their upper bound is the
    engine's to check."""
    if not isinstance(prompt, (Sequence, np.ndarray)) or isinstance(prompt, (bytes, bytearray)):
        raise ValueError(f"the prompt is {prompt!r:.80}; give {PROMPT_FORMS}")
    for token in prompt:
        if not is_whole(token) or token < 0:
            raise ValueError(
                f"the prompt holds {token!r:.80}; give token ids, whole numbers of 0 or more"
            )
    return [int(token) for token in prompt]
