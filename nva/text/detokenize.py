"""Sampled ids to text that can be shown at once.

The one law: however the ids arrive, the pieces of text join to exactly `tokenizer.decode(ids,
skip_special_tokens=True, clean_up_tokenization_spaces=False)`, cut before the stop string that
completes first; no piece ends inside a character or holds a part of that stop string. In one thing
decode is read more kindly: where tokens stand for single bytes, one that fits no character shows as
a replacement and spoils no character before it, which may be on a screen already.

A stream of text is a frozen record, a step returns the next one. Read next: run.py, which puts
these around the engine's loop."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Mapping, Sequence

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
    special: Mapping[str, int] = attrs.field(factory=dict, repr=False)  # the others, by name
    byte_of: Mapping[int, int] = attrs.field(factory=dict, repr=False)
    """What each token that stands for a single byte stands for, in the order of bytes."""
    window: tuple[int, ...] = ()
    n_shown: int = 0


def detokenizer(tokenizer: Tokenizer | None) -> Detokenizer:
    """The detokenizer that has seen nothing, from which every sample starts. Without a tokenizer
    all text is empty."""
    if tokenizer is None:
        return Detokenizer(decode=lambda _: "", visible=frozenset())
    vocab = tokenizer.get_vocab()
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    decode = _decoder(tokenizer)
    return Detokenizer(
        decode=decode,
        visible=frozenset(vocab.values()) - special,
        special={name: id_ for name, id_ in vocab.items() if id_ in special},
        byte_of=_bytes(vocab, decode),
    )


def _bytes(vocab: Mapping[str, int], decode: Callable[[Sequence[int]], str]) -> dict[int, int]:
    """The 256 tokens that stand for one byte each (byte fallback); none where the decoder shows
    their names instead."""
    ids = [vocab.get(f"<0x{byte:02X}>") for byte in range(256)]
    known = [id_ for id_ in ids if id_ is not None]
    joins = len(known) == 256 and "é" in decode([known[byte] for byte in "é".encode()])
    return {id_: byte for byte, id_ in enumerate(known)} if joins else {}


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
    if window == detok.window:
        return detok, ""
    text = settled(detok, window)
    new = text[detok.n_shown :]
    if len(window) > 2 * N_KEPT:  # not at every token, as it takes another decode
        window = window[-N_KEPT:]
        text = settled(detok, window)
    return evolve(detok, window=window, n_shown=len(text)), new


def flush(detok: Detokenizer) -> str:
    """The text held back, now that no id follows."""
    return detok.decode(with_valid_bytes(detok, detok.window, is_last=True))[detok.n_shown :]


def settled(detok: Detokenizer, window: Sequence[int]) -> str:
    """The text of a window that the next id can't change. A replacement at its end may still become
    a character, except where byte tokens are told from others: then such bytes are left out."""
    text = detok.decode(with_valid_bytes(detok, window, is_last=False))
    return text if detok.byte_of else text.removesuffix(REPLACEMENT)


def with_valid_bytes(detok: Detokenizer, ids: Sequence[int], is_last: bool) -> Sequence[int]:
    """The ids, with the bytes of a replacement for each byte that fits no character.

    Of a run of byte tokens that is not valid UTF-8 the decoder makes nothing but replacements, so
    the run is made valid. Bytes at the end that may become a character are left out, unless the end
    is the last."""
    if not any(token in detok.byte_of for token in ids):
        return ids
    byte_ids = tuple(detok.byte_of)
    valid: list[int] = []
    run = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for token in ids:
        if token in detok.byte_of:
            valid += _valid(run.decode(bytes([detok.byte_of[token]])), byte_ids)
        else:
            valid += [*_valid(run.decode(b"", True), byte_ids), token]
    return valid + _valid(run.decode(b"", True), byte_ids) if is_last else valid


def _valid(text: str, byte_ids: Sequence[int]) -> list[int]:
    """The byte tokens of characters, and of replacements for what Python marks as no character."""
    data = re.sub("[\udc80-\udcff]", REPLACEMENT, text).encode()
    return [byte_ids[byte] for byte in data]


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
    stop_ids: Mapping[int, str] = attrs.field(factory=dict)  # of stop strings that are tokens
    n_exempt: int = (
        0  # tokens still to come whose text can't be part of a stop string: min_tokens at first
    )
    held: str = ""  # could still become a stop string
    stopped_by: str | None = None


def text_stream(detok: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> TextStream:
    """The stream before the first token. A stop string that is a special token, which has no text,
    stops at its id.

    Raises ValueError for stop strings without a tokenizer to read them by, and for one that has
    more than a special token."""
    if stops and not detok.visible:
        raise ValueError(
            f"the checkpoint has no tokenizer to find stop={list(stops)!r:.80}; give stop_token_ids"
        )
    for stop in stops:
        held = [name for name in detok.special if name in stop and stop not in detok.special]
        if held:
            raise ValueError(
                f"stop has {stop!r:.80}, which can't be found: {held[0]} in it is a special token, "
                f"which has no text; give {held[0]!r} alone, or the text without it"
            )
    return TextStream(
        detok=detok,
        stops=tuple(stops),
        stop_ids={detok.special[stop]: stop for stop in stops if stop in detok.special},
        n_exempt=min_tokens,
    )


def read(stream: TextStream, ids: Sequence[int]) -> tuple[TextStream, str]:
    """Take the next ids and give the text that can be shown: never a part of a stop string, never
    half a character."""
    if stream.stopped_by is not None:
        return stream, ""
    n_exempt = min(stream.n_exempt, len(ids))
    detok, exempt = push(stream.detok, ids[:n_exempt]) if n_exempt else (stream.detok, "")
    watched = ids[n_exempt:]
    end = next((at for at, token in enumerate(watched) if token in stream.stop_ids), None)
    detok, text = push(detok, watched[:end])
    if end is not None:
        text += flush(detok)  # nothing follows
    shown, held, stop = split_at_stop(stream.held + text, stream.stops)
    if stop is None and end is not None:
        shown, held, stop = shown + held, "", stream.stop_ids[watched[end]]
    after = evolve(
        stream, detok=detok, n_exempt=stream.n_exempt - n_exempt, held=held, stopped_by=stop
    )
    return after, exempt + shown


def finish(stream: TextStream) -> tuple[TextStream, str]:
    """Give the rest of the text, now that no id follows; it may complete a stop string."""
    if stream.stopped_by is not None:
        return stream, ""
    shown, held, stop = split_at_stop(stream.held + flush(stream.detok), stream.stops)
    return evolve(stream, held="", stopped_by=stop), shown + held
