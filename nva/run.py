"""Prompts in, text out: the engine's one loop with a tokenizer on both ends.

`step` is that loop's body; `stream` turns it for as long as its own requests are unanswered,
`generate` collects a stream, `run` loads a model first. The law: each request is answered once, in
full, whatever else the engine serves, whoever calls for its steps, and wherever one is interrupted.
Read next: steps/schedule.py, where a step begins; answers.py, where it ends; load.py makes the
Engine."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nva.engine import Engine, step, sweep
from nva.loading.load import load
from nva.loading.options import LoadOptions, Options
from nva.state.checks import takes_fields_of
from nva.state.request import Request, SamplingParams, request
from nva.steps.submit import submit
from nva.text.answers import (
    Completion,
    Event,
    TextDelta,
    Transcript,
    expect,
    take_events,
    transcript,
)
from nva.text.images import encode_prompt
from nva.text.prompts import PROMPT_FORMS, Prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None


@takes_fields_of(Options)
def run(
    prompts: Prompts,
    params: Params = None,
    model: str | Path | None = None,
    **options: Unpack[LoadOptions],
) -> list[Completion]:
    """Answer prompts with a model: load it, generate, forget it. Arguments are those of generate()
    and load()."""
    return generate(load(model, **options), prompts, params)


def generate(
    engine: Engine, prompts: Prompts, params: Params = None, progress: bool = False
) -> list[Completion]:
    """One Completion per prompt, in order. `progress` shows a bar and tokens/s on stderr.

    A prompt is a str, a list of token ids, or {"messages": [{"role": ..., "content": ...}, ...]}
    for the checkpoint's chat template, to which chat.py says what else can be given: tools,
    options, an answer to continue. For a model that sees, content may be a list of {"type": "text",
    "text": ...} and {"type": "image", "image": path or PIL image}. params: one record for all
    prompts or one for each; unset fields take the checkpoint's generation_config. Raises
    ValueError, with nothing queued, for a prompt or parameter that can't be served."""
    listed = list(completions(engine, prompts, params, progress))
    return sorted(listed, key=lambda completion: completion.index)


def completions(
    engine: Engine, prompts: Prompts, params: Params = None, progress: bool = False
) -> Generator[Completion]:
    """What generate() collects: the Completions, each as soon as it is there."""
    with closing(stream(engine, prompts, params)) as events:
        for event in _with_progress(events, len(_listed(prompts))) if progress else events:
            if isinstance(event, Completion):
                yield event


def answers(
    engine: Engine, asked: Iterable[tuple[Prompt, SamplingParams]], window: int
) -> Generator[tuple[int, Completion | ValueError]]:
    """The Completion of each prompt with its number, in the order in which they end. A prompt that
    can't be served gives the ValueError that says why, and harms no other.

    `asked` is read as answers come, so that at most `window` prompts are held at a time. Closing
    the iterator early aborts what is unanswered.
    """
    left = enumerate(asked)
    open_streams: dict[int, Generator[Event]] = {}
    try:
        while True:
            for number, (prompt, params) in itertools.islice(left, window - len(open_streams)):
                try:
                    open_streams[number] = stream(engine, prompt, params)
                except ValueError as error:
                    yield number, error
            if not open_streams:
                return
            # Each stream in turn gives what is there, or turns the loop until something is.
            for number, events in [*open_streams.items()]:
                event = next(events)
                if isinstance(event, Completion):
                    del open_streams[number]
                    yield number, event
    finally:
        for events in open_streams.values():
            events.close()


def stream(engine: Engine, prompts: Prompts, params: Params = None) -> Generator[Event]:
    """Increments of every sample as they come, and each prompt's Completion at its end.

    Bad input raises at the call, as in generate(); the prompts are queued when the first event is
    read. Closing the iterator early aborts what is unanswered. Several streams of one engine may be
    read in turn, and by several threads, each its own: a step serves all."""
    with engine.lock:
        requests = _requests(engine, prompts, params)
        submit(engine.state, requests)  # raises what queueing them would raise
        engine.n_requests += len(requests)
    transcripts = [
        transcript(request, index, engine.detokenizer) for index, request in enumerate(requests)
    ]
    return _events(engine, transcripts)


def _events(engine: Engine, transcripts: Sequence[Transcript]) -> Generator[Event]:
    """Queue the requests, step until all are answered, and pass their events on; at the end none is
    in flight."""
    ids = {each.request.id for each in transcripts}
    n_open = len(ids)
    try:
        with engine.lock:
            engine.state = submit(engine.state, [each.request for each in transcripts])
            engine.answers = expect(engine.answers, transcripts)
        while n_open:
            for event in _next_events(engine, ids):
                n_open -= isinstance(event, Completion)
                yield event
    finally:
        engine.closed.append(ids)
        with engine.lock:
            sweep(engine)


def _next_events(engine: Engine, ids: Collection[int]) -> list[Event]:
    """What these requests were told, by another's step or by one now; perhaps nothing yet."""
    with engine.lock:
        if engine.answers.events.keys().isdisjoint(ids):
            step(engine)
        engine.answers, events = take_events(engine.answers, ids)
        return events


def _requests(engine: Engine, prompts: Prompts, params: Params) -> list[Request]:
    """The prompts as requests, all valid; ids continue the engine's count."""
    listed = _listed(prompts)
    each = (
        [params] * len(listed) if params is None or isinstance(params, SamplingParams) else params
    )
    if not isinstance(each, Sequence) or not all(
        found is None or isinstance(found, SamplingParams) for found in each
    ):
        raise ValueError(
            f"params is {params!r:.80}; give nva.SamplingParams(...), or a list of one for each "
            "prompt"
        )
    if len(each) != len(listed):
        raise ValueError(
            f"{len(listed)} prompts came with {len(each)} params; give one record, or one per "
            "prompt"
        )
    return [
        _request(engine, number, *pair)
        for number, pair in enumerate(zip(listed, each, strict=True))
    ]


def _request(engine: Engine, number: int, prompt: Prompt, params: SamplingParams | None) -> Request:
    params = (params or SamplingParams()).resolve(engine.defaults)
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else engine.eos_ids)}
    try:
        ids, media = encode_prompt(engine.tokenizer, engine.reader, prompt)
    except ValueError as error:
        raise ValueError(f"prompt {number}: {error}") from error
    return request(
        engine.n_requests + number, ids, params, stop_ids=frozenset(stop_ids), media=media
    )


def _listed(prompts: Prompts) -> list[Prompt]:
    """A list of prompts, where one alone may have been given. A list of whole numbers is one
    prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, (Sequence, np.ndarray)) or isinstance(prompts, (bytes, bytearray)):
        raise ValueError(f"prompts is {prompts!r:.80}; give {PROMPT_FORMS}, or a list of these")
    if isinstance(prompts, np.ndarray) and prompts.ndim != 1:
        raise ValueError(
            f"prompts is an array of shape {prompts.shape}; give list(array) if each row is a "
            "prompt"
        )
    if len(prompts) > 0 and not isinstance(prompts[0], (str, Mapping, Sequence, np.ndarray)):
        return [prompts]  # pyright: ignore[reportReturnType] - not a list of prompts, by the tests above
    return list(prompts)  # pyright: ignore[reportReturnType]


def _with_progress(events: Iterator[Event], n: int) -> Iterator[Event]:
    """The events, with a bar on stderr that counts answered prompts and tokens per second."""
    from tqdm import tqdm

    n_tokens = 0
    with tqdm(total=n, unit="prompt") as bar:
        for event in events:
            n_tokens += len(event.token_ids) if isinstance(event, TextDelta) else 0
            if isinstance(event, Completion) or n_tokens % 64 == 0:
                bar.set_postfix_str(
                    f"{n_tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s",
                    refresh=False,
                )
                bar.update(isinstance(event, Completion))
            yield event
