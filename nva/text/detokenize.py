"""Strings on both ends of the engine: prompts to token ids, sampled ids to text that can be shown
at once.

The one law: however the ids arrive, the pieces of text join to exactly `tokenizer.decode(ids,
skip_special_tokens=True, clean_up_tokenization_spaces=False)`, cut before the stop string that
completes first; no piece ends inside a character or holds a part of that stop string. A stream of
text is a frozen record, a step returns the next one. Read next: run.py, which puts these around the
engine's loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import attrs

from nva.state.columns import evolve
from nva.text.chat import Tokenizer

REPLACEMENT = "\ufffd"
"""What a decoder shows for bytes that are not, or not yet, a character."""
N_KEPT = 4
"""Tokens behind the newest that still matter to it: a character has at most four bytes, a token at
least one."""


@attrs.frozen(kw_only=True, slots=False)
class Detokenizer:
    """Ids on their way to text: the window is decoded anew with each token, its first n_shown
    characters are out."""

    decode: Callable[[Sequence[int]], str] = attrs.field(repr=False)
    visible: frozenset[int] = attrs.field(
        repr=False
    )  # ids that have a text: in the vocabulary and not special
    byte_ids: frozenset[
        int
    ]  # tokens <0x00> to <0xFF>, which stand for a byte that has no better token
    window: tuple[int, ...] = ()
    n_shown: int = 0


def detokenizer(tokenizer: Tokenizer | None) -> Detokenizer:
    """The detokenizer that has seen nothing, from which every sample starts. Without a tokenizer
    all text is empty."""
    if tokenizer is None:
        return Detokenizer(decode=lambda _: "", visible=frozenset(), byte_ids=frozenset())
    vocab = tokenizer.get_vocab()
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return Detokenizer(
        decode=_decoder(tokenizer),
        visible=frozenset(vocab.values()) - special - set(tokenizer.all_special_ids),
        byte_ids=frozenset(
            vocab[name] for name in (f"<0x{byte:02X}>" for byte in range(256)) if name in vocab
        ),
    )


def _decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Ids to text, special tokens and all: by the library below where there is one, as
    transformers' own code above it takes longer than the answer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return functools.partial(backend.decode, skip_special_tokens=False)


def push(detok: Detokenizer, ids: Sequence[int]) -> tuple[Detokenizer, str]:
    """Take the next ids and give the text that no later id can change. Constant cost per token."""
    window = (*detok.window, *(token for token in ids if token in detok.visible))
    if window == detok.window or window[-1] in detok.byte_ids:
        # A run of byte tokens is one text: "é" so far becomes three replacements if the next byte
        # is invalid.
        return evolve(detok, window=window), ""
    text = settled(detok.decode(window))
    new = text[detok.n_shown :]
    if len(window) > 2 * N_KEPT:  # not at every token, as it takes another decode
        window = window[-N_KEPT:]
        text = settled(detok.decode(window))
    return evolve(detok, window=window, n_shown=len(text)), new


def flush(detok: Detokenizer) -> str:
    """The text held back, now that no id follows."""
    return detok.decode(detok.window)[detok.n_shown :]


def settled(text: str) -> str:
    """The text without a replacement at its end, which the next byte may still turn into a
    character."""
    return text.removesuffix(REPLACEMENT)


def split_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str, str | None]:
    """Split into what can be shown and what must wait for more, and name the stop string found, if
    any.

    The stop that completes first wins, and of those that complete together the longest: so nobody
    waits for a longer match once one is there, and it makes no difference in which pieces the text
    came."""
    if not stops:
        return text, "", None
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if found:
        end, _, stop = min(found)
        return text[: end - len(stop)], "", stop
    longest = min(max(map(len, stops)) - 1, len(text))
    n_held = next(
        (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0
    )
    return text[: len(text) - n_held], text[len(text) - n_held :], None


@attrs.frozen(kw_only=True, slots=False)
class TextStream:
    """The text of one sample: a detokenizer, then a watch for stop strings. Once stopped_by is set,
    no text follows."""

    detok: Detokenizer
    stops: tuple[str, ...] = ()
    n_exempt: int = (
        0  # tokens still to come whose text can't be part of a stop string: min_tokens at first
    )
    held: str = ""  # could still become a stop string
    stopped_by: str | None = None


def text_stream(detok: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> TextStream:
    """The stream before the first token. Raises ValueError for stop strings without a tokenizer to
    read them by."""
    if stops and not detok.visible:
        raise ValueError(
            f"the checkpoint has no tokenizer to find stop={list(stops)!r:.80}; give stop_token_ids"
        )
    return TextStream(detok=detok, stops=tuple(stops), n_exempt=min_tokens)


def read(stream: TextStream, ids: Sequence[int]) -> tuple[TextStream, str]:
    """Take the next ids and give the text that can be shown: never a part of a stop string, never
    half a character."""
    if stream.stopped_by is not None:
        return stream, ""
    detok, exempt = (
        push(stream.detok, ids[: stream.n_exempt]) if stream.n_exempt else (stream.detok, "")
    )
    detok, text = push(detok, ids[stream.n_exempt :])
    shown, held, stop = split_at_stop(stream.held + text, stream.stops)
    n_exempt = max(0, stream.n_exempt - len(ids))
    return evolve(
        stream, detok=detok, n_exempt=n_exempt, held=held, stopped_by=stop
    ), exempt + shown


def finish(stream: TextStream) -> tuple[TextStream, str]:
    """Give the rest of the text, now that no id follows; it may complete a stop string."""
    if stream.stopped_by is not None:
        return stream, ""
    shown, held, stop = split_at_stop(stream.held + flush(stream.detok), stream.stops)
    return evolve(stream, held="", stopped_by=stop), shown + held
