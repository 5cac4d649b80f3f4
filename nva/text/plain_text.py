"""Text whose special tokens are only those that a chat template wrote.

A tokenizer takes `<|im_start|>` in a text for the token of that name, whoever wrote it: a user
could end a message and speak as the system. The law: a special token in a message is encoded as any
other text is, one of the template as its id, and where there is none in messages nothing changes.

How: before the template runs, each special token in messages is replaced by a word that nobody can
guess, its shield. After it, every special token that is left is the template's, and is replaced by
an alias, a token of a second tokenizer that knows the special tokens by their aliases alone. The
shields become text again, and one call encodes all of it, so that no border changes what is merged.
Read next: chat.py, which calls this."""

from __future__ import annotations

import re
import secrets
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import attrs


@attrs.frozen(kw_only=True, eq=False)
class PlainText:
    """A tokenizer of the `tokenizers` library that takes no special token for one, but aliases."""

    backend: Any
    secret: str  # within all shields and aliases
    special: Mapping[str, int]  # ids by name
    real_ids: Mapping[int, int]  # of a special token, by its alias's id


_known: weakref.WeakKeyDictionary[Any, PlainText] = weakref.WeakKeyDictionary()


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The ids of a tokenizer's special tokens, which have no text, by their names."""
    named = set(tokenizer.all_special_tokens)
    return {
        token.content: id_
        for id_, token in tokenizer.added_tokens_decoder.items()
        if token.special or token.content in named
    }


def encode_plain(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text in which special tokens are text. Those that the tokenizer itself adds
    stay."""
    plain = _plain_text(tokenizer)
    ids = plain.backend.encode(text, add_special_tokens=add_special_tokens).ids
    bare = plain.backend.encode(text, add_special_tokens=False).ids
    _check_ids(tokenizer, bare, plain)
    return ids


def shield(tokenizer: Any, value: Any) -> Any:
    """The value, a text or lists and dicts of texts, with a shield for each special token in it."""
    special = special_tokens(tokenizer)
    pattern = _pattern(special)
    if not special or not _holds(value, pattern):
        return value
    secret = _plain_text(tokenizer).secret
    names = {name: f"{secret}s{id_}z" for name, id_ in special.items()}
    return _map_texts(value, lambda text: pattern.sub(lambda found: names[found[0]], text))


def unshield(tokenizer: Any, text: str) -> str:
    """The text with special tokens in place of their shields."""
    plain = _plain_text(tokenizer)
    names = {str(id_): name for name, id_ in plain.special.items()}
    return re.sub(rf"{plain.secret}s(\d+)z", lambda found: names[found[1]], text)


def encode_shielded(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text whose shields are to be text again, and whose special tokens are ones.

    Raises ValueError if the tokenizer makes a special token of plain text."""
    plain = _plain_text(tokenizer)
    aliased = _pattern(plain.special).sub(
        lambda found: f"{plain.secret}a{plain.special[found[0]]}z", text
    )
    ids = plain.backend.encode(unshield(tokenizer, aliased), add_special_tokens=False).ids
    _check_ids(tokenizer, ids, plain)
    return [plain.real_ids.get(id_, id_) for id_ in ids]


def _check_ids(tokenizer: Any, ids: list[int], plain: PlainText) -> None:
    """No special token came of plain text, but the one that stands for what has no token."""
    found = (set(plain.special.values()) & set(ids)) - {tokenizer.unk_token_id}
    if found:
        raise ValueError(
            f"the prompt holds {tokenizer.decode(sorted(found))!r:.80}, which the checkpoint's "
            'tokenizer makes a special token of; leave it out, or give "parse_special_tokens": True'
        )


def _plain_text(tokenizer: Any) -> PlainText:
    """What encodes plain text for a tokenizer; made when it is first needed, since it takes as long
    as loading one."""
    found = _known.get(tokenizer)
    if found is None:
        found = _known[tokenizer] = _make_plain_text(tokenizer)
    return found


def _make_plain_text(tokenizer: Any) -> PlainText:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            "the prompt holds special tokens, which a tokenizer without tokenizer.json can't "
            'encode as text; leave them out, or give "parse_special_tokens": True'
        )
    from tokenizers import AddedToken, Tokenizer

    copy = Tokenizer.from_str(backend.to_str())
    copy.encode_special_tokens = True  # as any other text
    copy.no_truncation()
    copy.no_padding()
    secret = secrets.token_hex(8)
    special = special_tokens(tokenizer)
    aliases = {id_: f"{secret}a{id_}z" for id_ in special.values()}
    copy.add_tokens(
        [
            AddedToken(
                alias,
                single_word=known.single_word,
                lstrip=known.lstrip,
                rstrip=known.rstrip,
                normalized=known.normalized,
                special=False,
            )
            for id_, alias in aliases.items()
            for known in [tokenizer.added_tokens_decoder[id_]]
        ]
    )
    real_ids = {copy.token_to_id(alias): id_ for id_, alias in aliases.items()}
    return PlainText(backend=copy, secret=secret, special=special, real_ids=real_ids)


def _pattern(special: Mapping[str, int]) -> re.Pattern[str]:
    """Any of the special tokens; of two that begin alike, the longer."""
    return re.compile("|".join(re.escape(name) for name in sorted(special, key=len, reverse=True)))


def _holds(value: Any, pattern: re.Pattern[str]) -> bool:
    """Whether a text within the value matches."""
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, Mapping):
        return any(_holds(each, pattern) for each in value.values())
    return isinstance(value, (list, tuple)) and any(_holds(each, pattern) for each in value)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with each text in it changed; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_texts(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_texts(each, change) for each in value)
    return value
