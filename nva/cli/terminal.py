"""What the person at a terminal reads and types: answers on stdout, everything else on stderr.

The law: what is there is shown at once, and an interrupt loses nothing that is there.
Read next: main.py, which says what is asked.
"""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event

import attrs

from nva.text.answers import Completion, TextDelta


def say(text: str) -> None:
    """Tell the person at the terminal, beside the answers."""
    print(text, file=sys.stderr)


def print_answers(texts: Sequence[str], answers: Iterator[Completion], is_json: bool) -> int:
    """Print each answer when those before it are there, at an interrupt those that are; return
    their tokens."""
    is_alone, n_printed, n_tokens = len(texts) == 1, 0, 0
    waiting: dict[int, str] = {}
    try:
        for answer in answers:
            text = texts[answer.index]
            waiting[answer.index] = (
                as_json(text, answer) if is_json else as_text(text, answer, is_alone)
            )
            n_tokens += sum(len(sample.token_ids) for sample in answer.samples)
            while n_printed in waiting:
                print_beside_bar(waiting[n_printed])
                del waiting[n_printed]
                n_printed += 1
    finally:
        for index in sorted(waiting):
            print_beside_bar(waiting[index])
    return n_tokens


def print_beside_bar(text: str) -> None:
    """Print a line at once, where a progress bar may be on the same terminal."""
    from tqdm import tqdm

    with tqdm.external_write_mode():
        print(text, flush=True)


def as_json(prompt: str, completion: Completion) -> str:
    """A completion as one line of JSON."""
    return json.dumps({"prompt": prompt, **attrs.asdict(completion)}, ensure_ascii=False)


def as_text(prompt: str, completion: Completion, is_alone: bool) -> str:
    """The answers, under their prompt unless it is the only one."""
    answers = [sample.text.strip("\n") for sample in completion.samples]
    if len(answers) > 1:
        answers = [f"[{number}] {answer}" for number, answer in enumerate(answers)]
    return "\n".join(answers if is_alone else [f"> {prompt}", *answers, ""])


def speed(n_tokens: int, seconds: float) -> str:
    """How much was generated, how fast."""
    return f"[{n_tokens} tokens in {seconds:.1f} s, {n_tokens / seconds:.1f} tokens/s]"


def typed_lines() -> Iterator[str]:
    """What is typed, line by line, until /exit or the end of input; blank and interrupted lines are
    left out."""
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt) as ended:
            print()
            line = "/exit" if isinstance(ended, EOFError) else ""
        if line == "/exit":
            return
        if line:
            yield line


def show(events: Iterator[TextDelta | Completion], pressed: Event, max_model_len: int) -> str:
    """Print an answer as it comes, until it ends or Ctrl-C is pressed, and what it took; return its
    text."""
    text, n_tokens, start, note = "", 0, time.perf_counter(), "cut short"
    for event in events:
        if isinstance(event, Completion):
            note = f"{event.n_prompt_tokens} prompt tokens, {event.n_cached_tokens} of them cached"
            is_full = event.n_prompt_tokens + n_tokens >= max_model_len
            limit = "max_model_len; /reset makes room" if is_full else "max_tokens"
            note += f", ended by {limit}" if event.finish_reason == "length" else ""
        else:
            print(event.text, end="", flush=True)
            text, n_tokens = text + event.text, n_tokens + len(event.token_ids)
        if pressed.is_set():
            break
    print()
    say(f"{speed(n_tokens, time.perf_counter() - start)} {note}")
    return text


@contextmanager
def ctrl_c() -> Iterator[Event]:
    """Ctrl-C sets the event instead of raising, so that it never cuts a step of the engine in
    two."""
    pressed = Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Terminated(KeyboardInterrupt):
    """SIGTERM, taken as an interrupt: what is there is kept, and what is left is said."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises Terminated, where a signal can be handled: in the main thread."""

    def end(*_: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress_bar(n: int, is_quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar of n prompts on stderr; the function given is called with all tokens so far when a
    prompt is done."""
    from tqdm import tqdm

    with tqdm(total=n, unit="prompt", disable=is_quiet) as bar:

        def advance(n_tokens: int) -> None:
            seconds = max(bar.format_dict["elapsed"], 1e-9)
            bar.set_postfix_str(f"{n_tokens / seconds:.0f} tokens/s", refresh=False)
            bar.update()

        yield advance


def write_any_text() -> None:
    """A terminal that can't show a character gets it escaped: an answer that took minutes is not
    lost to an ASCII stdout."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
