"""Prompts to token ids: text, ids or messages in, ids out, by the checkpoint's own tokenizer.

The law: what a prompt says is encoded, or it is refused.
Read next: chat.py for messages, plain_text.py for text without special tokens, images.py for
images, detokenize.py for the way back.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nva.host.messages import say
from nva.state.checks import is_whole
from nva.state.errors import check_names
from nva.text.chat import Tokenizer, check_flag, check_text, encode_messages
from nva.text.library import IMPORTS
from nva.text.plain_text import encode_plain, special_tokens

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"messages": [{"role": ..., "content": ...}, ...]}; see chat.py for what else
it may have. Also {"text": str, "add_special_tokens": bool, "parse_special_tokens": bool}: whether
the tokenizer adds its own special tokens, and takes those written in the text for ones."""

TEXT_KEYS = ("text", "add_special_tokens", "parse_special_tokens")

PROMPT_FORMS = 'a str, a list of token ids, or {"messages": [{"role": ..., "content": ...}, ...]}'

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)

_told: weakref.WeakSet[Any] = weakref.WeakSet()  # tokenizers whose users were warned


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The checkpoint's tokenizer, from its own files and without running code of theirs; None if it
    has no such files.

    Raises ValueError if it has, but no tokenizer can be made from them.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        with IMPORTS:
            return _tokenizer_class(folder).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # for a bad file the tokenizers library raises a bare Exception
        raise ValueError(f"no tokenizer can be made from the files in {folder}: {error}") from error


def _tokenizer_class(folder: Path) -> Any:
    """What loads a checkpoint's tokenizer. tokenizer.json says all, and the general class leaves it
    as it is; the classes of single models put parts of their own in place of the file's.

    Importing AutoTokenizer, for checkpoints without that file, takes a second longer."""
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def encode(tokenizer: Tokenizer | None, prompt: Prompt) -> list[int]:
    """Token ids of a prompt. A str gets the special tokens its tokenizer adds, messages those of
    the chat template.

    Special tokens written in a str are special tokens, as whoever renders a template by hand needs;
    in messages they are text. {"text": ...} and {"messages": ...} may say otherwise.

    Raises ValueError for a prompt that is empty or of another form, and for one that the checkpoint
    can't encode."""
    if isinstance(prompt, str):
        ids = encode_text(tokenizer, prompt)
    elif isinstance(prompt, Mapping):
        is_text = "text" in prompt and "messages" not in prompt
        ids = (_encode_options if is_text else encode_messages)(tokenizer, prompt)
    else:
        ids = check_ids(prompt)
    if not ids:
        raise ValueError(f"the prompt is empty: {prompt!r:.80}; give at least one token")
    return ids


def _encode_options(tokenizer: Tokenizer | None, prompt: Mapping[str, Any]) -> list[int]:
    """Token ids of {"text": ...}, which says how its special tokens are meant."""
    check_names("a prompt with a text", prompt, TEXT_KEYS, {})
    if not isinstance(prompt["text"], str):
        raise ValueError(f"the text of a prompt is {prompt['text']!r:.80}; give a str")
    return encode_text(
        tokenizer,
        prompt["text"],
        check_flag(prompt, "add_special_tokens", True) if "add_special_tokens" in prompt else None,
        check_flag(prompt, "parse_special_tokens", True),
    )


def encode_text(
    tokenizer: Tokenizer | None,
    text: str,
    add_special_tokens: bool | None = None,
    parse_special_tokens: bool = True,
) -> list[int]:
    """Token ids of a text; of no text none at all. With the special tokens that the tokenizer adds,
    or without them; by default with them, but no BOS before one that the text has already."""
    if tokenizer is None:
        raise ValueError(f"the checkpoint has no tokenizer to encode {text!r:.80}; give token ids")
    if not check_text(text):
        return []
    if not parse_special_tokens:
        return encode_plain(tokenizer, text, add_special_tokens is not False)
    ids = list(tokenizer.encode(text, add_special_tokens=add_special_tokens is not False))
    if add_special_tokens is None and _has_second_bos(tokenizer, text, ids):
        return ids[1:]
    return ids


def _has_second_bos(tokenizer: Tokenizer, text: str, ids: list[int]) -> bool:
    """Whether a text begins with the very token that its tokenizer has put before it, as one does
    that a chat template wrote. Says once per tokenizer that there will be one."""
    if ids[:1] != ids[1:2]:
        return False
    if len(tokenizer.encode(text, add_special_tokens=False)) == len(ids):
        return False  # both are the text's own
    if ids[0] not in special_tokens(tokenizer).values():
        return False
    if tokenizer not in _told:
        _told.add(tokenizer)
        say(
            f"the prompt {text!r:.40} begins with {tokenizer.convert_ids_to_tokens(ids[0])} and "
            'gets no other; {"text": ..., "add_special_tokens": True} would add one',
        )
    return True


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
