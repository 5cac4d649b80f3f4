"""Prompts in, text out: the engine's one loop with a tokenizer on both ends.

`step` is that loop's body; `stream` turns it for as long as its own requests are unanswered, `generate` collects a
stream, `run` loads a model first. The law: each request is answered once, in full, whatever else the engine serves.
Read next: steps/schedule.py, where a step begins; load.py makes the Engine.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import attrs

from nva.forward import KV
from nva.images import encode_prompt
from nva.load import Engine, load
from nva.state.engine import check
from nva.state.plan import Output, TokenLogprobs
from nva.state.request import Finished, FinishReason, Request, SamplingParams, request
from nva.steps.commit import abort, commit, stop
from nva.steps.pack import pack
from nva.steps.sample import sample
from nva.steps.schedule import schedule, withdraw
from nva.steps.submit import submit
from nva.text import Prompt, TextStream, finish, read, text_stream

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None


@attrs.frozen(kw_only=True)
class TextDelta:
    """An increment of one sample: the text and token ids that are new. Text may lag behind the ids."""

    index: int  # of the prompt
    sample: int
    text: str
    token_ids: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Sample:
    """One finished answer. Its text ends before a stop string or stop token; its token_ids include what was drawn."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stopped_by: int | str | None  # the token id or string that ended it
    logprobs: tuple[TokenLogprobs, ...] | None  # one per token id, if asked for


@attrs.frozen(kw_only=True)
class Completion:
    """The answer to one prompt. The properties are those of its first sample."""

    index: int
    prompt_token_ids: tuple[int, ...]
    n_cached_tokens: int  # prompt tokens that the prefix cache had
    samples: tuple[Sample, ...]  # one per n
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None  # one per prompt token, None for the first, if asked for

    n_prompt_tokens = property(lambda self: len(self.prompt_token_ids))
    text = property(lambda self: self.samples[0].text)
    token_ids = property(lambda self: self.samples[0].token_ids)
    finish_reason = property(lambda self: self.samples[0].finish_reason)
    stopped_by = property(lambda self: self.samples[0].stopped_by)
    logprobs = property(lambda self: self.samples[0].logprobs)


def run(prompts: Prompts, params: Params = None, model: str | None = None, **options: Any) -> list[Completion]:
    """Answer prompts with a model: load it, generate, forget it. Arguments are those of generate() and load()."""
    return generate(load(model, **options), prompts, params)


def generate(engine: Engine, prompts: Prompts, params: Params = None, progress: bool = False) -> list[Completion]:
    """One Completion per prompt, in order. `progress` shows a bar and tokens/s on stderr.

    A prompt is a str, a list of token ids, or {"messages": [{"role": ..., "content": ...}, ...]} for the checkpoint's
    chat template; for a model that sees, content may be a list of {"type": "text", "text": ...} and {"type": "image",
    "image": path or PIL image}. params: one record for all prompts or one for each; unset fields take the checkpoint's
    generation_config. Raises ValueError, with nothing queued, for a prompt or parameter that can't be served.
    """
    found: dict[int, Completion] = {}
    events = stream(engine, prompts, params)
    for event in _with_progress(events, len(_listed(prompts))) if progress else events:
        if isinstance(event, Completion):
            found[event.index] = event
    return [found[index] for index in sorted(found)]


def stream(engine: Engine, prompts: Prompts, params: Params = None) -> Generator[TextDelta | Completion]:
    """Increments of every sample as they come, and each prompt's Completion at its end.

    Bad input raises at the call, as in generate(); the prompts are queued when the first event is read. Closing the
    iterator early aborts what is unanswered. Several streams of one engine may be read in turn: a step serves all.
    """
    requests = _requests(engine, prompts, params)
    submit(engine.state, requests)  # raises what queueing them would raise
    engine.n_requests += len(requests)
    streams = [_text_streams(engine, found) for found in requests]
    return _events(
        engine,
        [Transcript(request=r, index=i, streams=s) for i, (r, s) in enumerate(zip(requests, streams, strict=True))],
    )


def step(engine: Engine) -> Output:
    """One step of the engine, all of it. If it raises, the engine can go on from where it was before.

    That holds wherever an interrupt falls, between the forward's return and the assignment of its handle as well.
    """
    before, caches = engine.state, engine.kv.layers
    state, plan = schedule(before)  # who runs, how many tokens, which blocks
    batch, draw = pack(state, plan)  # arrays for the device; who samples, and how
    try:
        logits, engine.kv = engine.forward(engine.params, engine.kv, batch)
        sampled = sample(logits, draw, engine.filter)
        engine.state, output = commit(state, plan, sampled)  # rows finish, blocks return
    except BaseException:
        engine.kv, engine.state = KV(caches), withdraw(before, plan, batch)
        raise
    if os.environ.get("NVA_CHECK") == "1":
        check(engine.state)
    return output


@attrs.define(kw_only=True)
class Transcript:
    """What a request has been answered so far, and the events that its stream has yet to read. Lists are per sample."""

    request: Request
    index: int  # of the prompt in its call
    streams: list[TextStream]
    texts: list[str] = attrs.field(init=False)
    logprobs: list[list[TokenLogprobs]] = attrs.field(init=False)
    scores: dict[int, TokenLogprobs] = attrs.field(init=False, factory=dict)  # by prompt position
    finished: dict[int, Finished] = attrs.field(init=False, factory=dict)  # by sample
    events: deque[TextDelta | Completion] = attrs.field(init=False, factory=deque)

    def __attrs_post_init__(self) -> None:
        self.texts, self.logprobs = [""] * len(self.streams), [[] for _ in self.streams]

    @property
    def is_answered(self) -> bool:
        return len(self.finished) == self.request.params.n


def _events(engine: Engine, transcripts: Sequence[Transcript]) -> Generator[TextDelta | Completion]:
    """Queue the requests, step until all are answered, and pass their events on; at the end none is in flight."""
    ids = [transcript.request.id for transcript in transcripts]
    try:
        engine.state = submit(engine.state, [transcript.request for transcript in transcripts])
        engine.transcripts.update(zip(ids, transcripts, strict=True))
        while True:
            for transcript in transcripts:
                while transcript.events:
                    yield transcript.events.popleft()
            if all(transcript.is_answered for transcript in transcripts):
                return
            _deliver(engine, step(engine))
    finally:
        engine.state, _ = abort(engine.state, ids)
        for id_ in ids:
            engine.transcripts.pop(id_, None)


def _deliver(engine: Engine, output: Output) -> None:
    """Write a step's output into the transcripts, and end the samples whose text holds a stop string."""
    for found, position, logprobs in output.scores:
        engine.transcripts[found.id].scores[position] = logprobs
    stopped = {(found.request.id, found.sample) for found in output.finished if found.reason == "stop"}
    tokens = zip(output.requests, output.samples.tolist(), output.tokens.tolist(), output.logprobs, strict=True)
    for found, number, token, logprobs in tokens:
        transcript = engine.transcripts[found.id]
        transcript.logprobs[number] += [logprobs] if logprobs is not None else []
        _write(transcript, number, token, has_text=(found.id, number) not in stopped)
    finished = list(output.finished)
    for found, number in zip(output.requests, output.samples.tolist(), strict=True):
        stopped_by = engine.transcripts[found.id].streams[number].stopped_by
        if stopped_by is not None:
            engine.state, ended = stop(engine.state, found.id, number, stopped_by)
            finished += [ended] if ended is not None else []  # None if its last token ended it too
    for ended in finished:
        _close(engine.transcripts[ended.request.id], ended)


def _write(transcript: Transcript, number: int, token: int, has_text: bool) -> None:
    """Add a token to a sample; one that stops it has no text."""
    text = ""
    if has_text:
        transcript.streams[number], text = read(transcript.streams[number], [token])
        transcript.texts[number] += text
    transcript.events.append(TextDelta(index=transcript.index, sample=number, text=text, token_ids=(token,)))


def _close(transcript: Transcript, finished: Finished) -> None:
    """A sample ended: the text held back is due, and with the last sample the request's Completion."""
    number = finished.sample
    transcript.finished[number] = finished
    transcript.streams[number], text = finish(transcript.streams[number])
    if text:
        transcript.texts[number] += text
        transcript.events.append(TextDelta(index=transcript.index, sample=number, text=text, token_ids=()))
    if transcript.is_answered:
        transcript.events.append(_completion(transcript))


def _completion(transcript: Transcript) -> Completion:
    prompt, params = tuple(transcript.request.prompt.tolist()), transcript.request.params
    scores = [transcript.scores.get(position) for position in range(len(prompt))]
    return Completion(
        index=transcript.index,
        prompt_token_ids=prompt,
        n_cached_tokens=transcript.finished[0].n_cached,
        samples=tuple(_sample(transcript, number) for number in range(params.n)),
        prompt_logprobs=None if params.prompt_logprobs is None else tuple(scores),
    )


def _sample(transcript: Transcript, number: int) -> Sample:
    finished, stopped_by = transcript.finished[number], transcript.streams[number].stopped_by
    return Sample(
        text=transcript.texts[number],
        token_ids=finished.token_ids,
        finish_reason="stop" if stopped_by is not None else finished.reason,
        stopped_by=stopped_by if stopped_by is not None else finished.stopped_by,
        logprobs=None if transcript.request.params.logprobs is None else tuple(transcript.logprobs[number]),
    )


def _requests(engine: Engine, prompts: Prompts, params: Params) -> list[Request]:
    """The prompts as requests, all valid; ids continue the engine's count."""
    listed = _listed(prompts)
    each = [params] * len(listed) if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != len(listed):
        raise ValueError(f"{len(listed)} prompts came with {len(each)} params; give one record, or one per prompt")
    return [_request(engine, number, *pair) for number, pair in enumerate(zip(listed, each, strict=True))]


def _request(engine: Engine, number: int, prompt: Prompt, params: SamplingParams | None) -> Request:
    params = (params or SamplingParams()).resolve(engine.defaults)
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else engine.eos_ids)}
    try:
        ids, media = encode_prompt(engine.tokenizer, engine.reader, prompt)
    except ValueError as error:
        raise ValueError(f"prompt {number}: {error}") from error
    return request(engine.n_requests + number, ids, params, stop_ids=frozenset(stop_ids), media=media)


def _text_streams(engine: Engine, found: Request) -> list[TextStream]:
    return [text_stream(engine.detokenizer, found.params.stop, found.params.min_tokens) for _ in range(found.params.n)]


def _listed(prompts: Prompts) -> list[Prompt]:
    """A list of prompts, where one alone may have been given. A list of whole numbers is one prompt."""
    if isinstance(prompts, (str, Mapping)) or (
        len(prompts) > 0 and not isinstance(prompts[0], (str, Mapping, Sequence))
    ):
        return [prompts]  # pyright: ignore[reportReturnType] - not a list of prompts, by the test above
    return list(prompts)  # pyright: ignore[reportReturnType]


def _with_progress(events: Iterator[TextDelta | Completion], n: int) -> Iterator[TextDelta | Completion]:
    """The events, with a bar on stderr that counts answered prompts and tokens per second."""
    from tqdm import tqdm

    n_tokens = 0
    with tqdm(total=n, unit="prompt") as bar:
        for event in events:
            n_tokens += len(event.token_ids) if isinstance(event, TextDelta) else 0
            if isinstance(event, Completion) or n_tokens % 64 == 0:
                bar.set_postfix_str(f"{n_tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
                bar.update(isinstance(event, Completion))
            yield event
