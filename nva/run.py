"""Prompts in, text out: the engine's one loop with a tokenizer on both ends.

`stream` makes requests of prompts and gives their answers as they come, `astream` the same for
asyncio, `generate` collects a stream, `run` loads a model first. The law: each request is answered
once, in full, whatever else the engine serves, whoever calls for its steps, and wherever one is
interrupted. Read next: streams.py, what is read; loop.py, the step; steps/schedule.py, where a step
begins; loading/load.py, which makes the Engine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from nva.engine import Engine
from nva.kernels import Change, Kernels
from nva.loading.load import load
from nva.loading.options import LoadOptions, Options
from nva.loop import Steps
from nva.state.checks import takes_fields_of
from nva.state.request import Request, SamplingParams, request
from nva.steps.submit import check_fits
from nva.streams import AsyncStream, Stream
from nva.text.answers import Completion, StreamEvent, TextDelta, Transcript, transcript
from nva.text.images import encode_prompt
from nva.text.prompts import PROMPT_FORMS, Prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams | None] | None


@takes_fields_of(Options)
def run(
    prompts: Prompts,
    params: Params = None,
    model: str | os.PathLike[str] | None = None,
    *,
    kernels: Kernels | Change | None = None,
    steps: Steps | None = None,
    **options: Unpack[LoadOptions],
) -> list[Completion]:
    """Answer prompts with a model: load it, generate, forget it. Arguments are those of generate()
    and load()."""
    engine = load(model, kernels=kernels, steps=steps, **options)
    return generate(engine, prompts, params)


def generate(
    engine: Engine, prompts: Prompts, params: Params = None, progress: bool = False
) -> list[Completion]:
    """One Completion per prompt, in order. `progress` shows a bar and tokens/s on stderr.

    A prompt is a str, a list of token ids, or {"messages": [{"role": ..., "content": ...}, ...]}
    for the checkpoint's chat template, to which chat.py says what else can be given: tools,
    options, an answer to continue. For a model that sees, content may be a list of {"type": "text",
    "text": ...} and {"type": "image", "image": path or PIL image}. params: one record for all
    prompts or one for each; unset fields take the checkpoint's generation_config. Raises
    ValueError, with nothing queued, for a prompt or parameter that can't be served; it names the
    prompt by its place in `prompts`, from 0."""
    listed = list(completions(engine, prompts, params, progress))
    return sorted(listed, key=lambda completion: completion.index)


def completions(
    engine: Engine, prompts: Prompts, params: Params = None, progress: bool = False
) -> Generator[Completion]:
    """What generate() collects: the Completions, each as soon as it is there."""
    with stream(engine, prompts, params) as events:
        n = len(events.transcripts)
        for event in _with_progress(events, n) if progress else events:
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
    streams: dict[int, Stream] = {}
    try:
        while True:
            for number, (prompt, params) in itertools.islice(left, window - len(streams)):
                try:
                    asked_one = _transcripts(engine, [prompt], [params], first=number)
                    streams[number] = Stream(engine, asked_one)
                except ValueError as error:
                    yield number, error
            if not streams:
                return
            # Each stream in turn gives what is there, or takes a step until something is.
            for number, events in [*streams.items()]:
                event = next(events)
                if isinstance(event, Completion):
                    del streams[number]
                    yield number, event
    finally:
        for events in streams.values():
            events.close()


def stream(engine: Engine, prompts: Prompts, params: Params = None) -> Stream:
    """Increments of every sample as they come, and each prompt's Completion at its end.

    Bad input raises at the call, as in generate(); the prompts are queued when the first event is
    read. abort() has the unanswered end with what they have, close() reads no more; both may be
    called from other threads. Several streams of one engine may be read in turn, and by several
    threads: a step serves all."""
    listed = _listed(prompts)
    return Stream(engine, _transcripts(engine, listed, _one_each(params, len(listed))))


def astream(engine: Engine, prompts: Prompts, params: Params = None) -> AsyncStream:
    """stream() for asyncio: `async for event in nva.astream(engine, prompts)`.

    The event loop is never held up, and any number of streams share the engine's steps. Cancelling
    who reads ends what it asked. Bad input raises when the first event is asked for."""
    return AsyncStream(engine, lambda: stream(engine, prompts, params))


def _transcripts(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams | None],
    first: int = 0,
) -> list[Transcript]:
    """What will be told of each prompt, as a request that fits the engine. `first` is the number
    of the first prompt, for who reads an error. Raises ValueError for a prompt that can't be
    served."""
    ids = list(itertools.islice(engine.ids, len(prompts)))
    found: list[Transcript] = []
    resolved: dict[int, SamplingParams] = {}  # by id(): many prompts may share one long record
    for number, (id_, prompt, each) in enumerate(zip(ids, prompts, params, strict=True), first):
        try:
            if id(each) not in resolved:
                resolved[id(each)] = (each or SamplingParams()).resolve(engine.defaults)
            asked = _request(engine, prompt, resolved[id(each)], id_)
            found.append(transcript(asked, number - first, ids[0], engine.detokenizer))
        except ValueError as error:
            # The engine's own count of requests means nothing to who called.
            said = str(error).removeprefix(f"request {id_!r}: ")
            raise ValueError(f"prompt {number}: {said}") from error
    return found


def _request(engine: Engine, prompt: Prompt, params: SamplingParams, id_: int) -> Request:
    """A prompt as a request that fits the engine."""
    ends = frozenset[int]() if params.ignore_eos else engine.eos_ids
    with engine.encoding:
        ids, media = encode_prompt(engine.tokenizer, engine.reader, prompt)
    stop_ids = ends.union(params.stop_token_ids)
    asked = request(id_, ids, params, stop_ids=stop_ids, media=media)
    check_fits(asked, engine.state.limits)
    return asked


def _one_each(params: Params, n: int) -> Sequence[SamplingParams | None]:
    """The parameters of each of n prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * n
    form = "give nva.SamplingParams(...), or a list of one for each prompt"
    each: Any = params
    if not isinstance(each, Sequence) or isinstance(each, (str, bytes)):
        raise ValueError(f"params is {each!r:.80}; {form}")
    listed = cast("Sequence[Any]", each)
    if len(listed) != n:
        raise ValueError(
            f"{n} prompts came with {len(listed)} params; give one record, or one per prompt"
        )
    for number, found in enumerate(listed):
        if found is not None and not isinstance(found, SamplingParams):
            raise ValueError(f"prompt {number}: its params are {found!r:.80}; {form}")
    return listed


def _listed(prompts: Prompts) -> list[Prompt]:
    """A list of prompts, where one alone may have been given. A list of whole numbers is one
    prompt."""
    given: Any = prompts
    if isinstance(given, (str, Mapping)):
        return [cast(Prompt, given)]
    if not isinstance(given, (Sequence, np.ndarray)) or isinstance(given, (bytes, bytearray)):
        raise ValueError(f"prompts is {given!r:.80}; give {PROMPT_FORMS}, or a list of these")
    listed = cast("Sequence[Any]", given)
    if isinstance(given, np.ndarray) and given.ndim != 1:
        raise ValueError(
            f"prompts is an array of shape {np.shape(listed)}; give list(array) if each row is a "
            "prompt"
        )
    if len(listed) > 0 and not isinstance(listed[0], (str, Mapping, Sequence, np.ndarray)):
        return [listed]
    return list(listed)


def _with_progress(events: Iterator[StreamEvent], n: int) -> Iterator[StreamEvent]:
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
