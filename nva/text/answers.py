"""What requests have been answered so far, and the events in which whoever asked reads it, a
Completion the last.

The law: answers are a value. `deliver` makes the next of a step's output, so a step that raises has
told nothing, and a step that ends has told all of it, whoever called for the step. Read next:
run.py, which keeps them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from nva.state.columns import evolve
from nva.state.engine import EngineState
from nva.state.plan import Output, TokenLogprobs
from nva.state.request import Finished, FinishReason, Request
from nva.steps.apply import stop
from nva.text.detokenize import Detokenizer, TextStream, finish, read, text_stream

RequestId = int | str


@attrs.frozen(kw_only=True)
class TextDelta:
    """An increment of one sample: the text and token ids that are new. Text may lag behind the
    ids."""

    index: int  # of the prompt
    sample: int
    text: str
    token_ids: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Sample:
    """One finished answer. Its text ends before a stop string or stop token; its token_ids include
    what was drawn."""

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
    prompt_logprobs: (
        tuple[TokenLogprobs | None, ...] | None
    )  # one per prompt token, None for the first, if asked for

    n_prompt_tokens = property(lambda self: len(self.prompt_token_ids))
    text = property(lambda self: self.samples[0].text)
    token_ids = property(lambda self: self.samples[0].token_ids)
    finish_reason = property(lambda self: self.samples[0].finish_reason)
    stopped_by = property(lambda self: self.samples[0].stopped_by)
    logprobs = property(lambda self: self.samples[0].logprobs)


Event = TextDelta | Completion


@attrs.frozen(kw_only=True, slots=False)
class Draft:
    """One sample as far as it has come."""

    stream: TextStream
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finished: Finished | None = None


@attrs.frozen(kw_only=True, slots=False)
class Transcript:
    """One request as far as it is answered."""

    request: Request
    index: int  # of the prompt in its call
    drafts: tuple[Draft, ...]  # one per sample
    scores: Mapping[int, TokenLogprobs] = attrs.field(factory=dict)  # by prompt position


@attrs.frozen(kw_only=True)
class Answers:
    """The transcripts of requests that are not answered in full, and the events that are unread,
    both by request id.

    A request that is in neither, such as one submitted by hand, has nobody who reads its answer.
    """

    transcripts: Mapping[RequestId, Transcript] = attrs.field(factory=dict)
    events: Mapping[RequestId, tuple[Event, ...]] = attrs.field(factory=dict)


def transcript(request: Request, index: int, detokenizer: Detokenizer) -> Transcript:
    """The transcript of a request that was told nothing yet. Raises ValueError as text_stream()
    does."""
    stream = text_stream(detokenizer, request.params.stop, request.params.min_tokens)
    return Transcript(
        request=request, index=index, drafts=(Draft(stream=stream),) * request.params.n
    )


def expect(answers: Answers, transcripts: Sequence[Transcript]) -> Answers:
    """The answers, with those that are still to come."""
    return attrs.evolve(
        answers,
        transcripts={**answers.transcripts, **{each.request.id: each for each in transcripts}},
    )


def forget(answers: Answers, ids: Collection[RequestId]) -> Answers:
    """The answers, without those of these requests."""
    return Answers(
        transcripts={id_: each for id_, each in answers.transcripts.items() if id_ not in ids},
        events={id_: each for id_, each in answers.events.items() if id_ not in ids},
    )


def take_events(answers: Answers, ids: Collection[int]) -> tuple[Answers, list[Event]]:
    """The unread events of these requests, which are read with that."""
    found = sorted(answers.events.keys() & ids)
    unread = {id_: events for id_, events in answers.events.items() if id_ not in ids}
    return attrs.evolve(answers, events=unread), [
        event for id_ in found for event in answers.events[id_]
    ]


def deliver(state: EngineState, answers: Answers, output: Output) -> tuple[EngineState, Answers]:
    """The answers with a step's output, and the state without the samples whose text holds a stop
    string."""
    transcripts, events = _scored(answers.transcripts, output), dict(answers.events)
    stopped = {
        (found.request.id, found.sample) for found in output.finished if found.reason == "stop"
    }
    tokens = zip(
        output.requests,
        output.samples.tolist(),
        output.tokens.tolist(),
        output.logprobs,
        strict=True,
    )
    finished = list(output.finished)
    for request, number, token, logprobs in tokens:
        if request.id not in transcripts:
            continue
        has_text = (request.id, number) not in stopped
        after, delta = _written(transcripts[request.id], number, token, logprobs, has_text)
        transcripts[request.id] = after
        events[request.id] = (*events.get(request.id, ()), delta)
        stopped_by = after.drafts[number].stream.stopped_by
        if stopped_by is not None:
            state, ended = stop(state, request.id, number, stopped_by)
            finished += [ended] if ended is not None else []  # None if its last token ended it too
    for ended in finished:
        id_ = ended.request.id
        if id_ in transcripts:
            transcripts[id_], last = _closed(transcripts[id_], ended)
            events[id_] = (*events.get(id_, ()), *last)
            if _is_answered(transcripts[id_]):
                del transcripts[id_]
    return state, Answers(transcripts=transcripts, events=events)


def _scored(
    transcripts: Mapping[RequestId, Transcript], output: Output
) -> dict[RequestId, Transcript]:
    """The transcripts with the log-probabilities of their prompts' tokens."""
    scores: dict[RequestId, dict[int, TokenLogprobs]] = {}
    for request, position, logprobs in output.scores:
        scores.setdefault(request.id, {})[position] = logprobs
    known = {id_: each for id_, each in scores.items() if id_ in transcripts}
    scored = {
        id_: evolve(transcripts[id_], scores={**transcripts[id_].scores, **new})
        for id_, new in known.items()
    }
    return {**transcripts, **scored}


def _written(
    before: Transcript, number: int, token: int, logprobs: TokenLogprobs | None, has_text: bool
) -> tuple[Transcript, TextDelta]:
    """Add a token to a sample; one that stops it has no text."""
    draft = before.drafts[number]
    stream, text = read(draft.stream, [token]) if has_text else (draft.stream, "")
    scores = draft.logprobs if logprobs is None else (*draft.logprobs, logprobs)
    after = _with_draft(
        before, number, evolve(draft, stream=stream, text=draft.text + text, logprobs=scores)
    )
    return after, TextDelta(index=before.index, sample=number, text=text, token_ids=(token,))


def _closed(before: Transcript, finished: Finished) -> tuple[Transcript, list[Event]]:
    """A sample ended: the text held back is due, and with the last sample the request's
    Completion."""
    number = finished.sample
    draft, events = before.drafts[number], list[Event]()
    stream, text = finish(draft.stream)
    if text:
        events.append(TextDelta(index=before.index, sample=number, text=text, token_ids=()))
    after = _with_draft(
        before, number, evolve(draft, stream=stream, text=draft.text + text, finished=finished)
    )
    return after, [*events, _completion(after)] if _is_answered(after) else events


def _with_draft(before: Transcript, number: int, draft: Draft) -> Transcript:
    return evolve(before, drafts=(*before.drafts[:number], draft, *before.drafts[number + 1 :]))


def _is_answered(transcript: Transcript) -> bool:
    return all(draft.finished is not None for draft in transcript.drafts)


def _completion(transcript: Transcript) -> Completion:
    prompt, params = tuple(transcript.request.prompt.tolist()), transcript.request.params
    scores = tuple(transcript.scores.get(position) for position in range(len(prompt)))
    first = transcript.drafts[0].finished
    assert first is not None
    return Completion(
        index=transcript.index,
        prompt_token_ids=prompt,
        n_cached_tokens=first.n_cached,
        samples=tuple(_sample(draft, params.logprobs is not None) for draft in transcript.drafts),
        prompt_logprobs=None if params.prompt_logprobs is None else scores,
    )


def _sample(draft: Draft, has_logprobs: bool) -> Sample:
    finished, stopped_by = draft.finished, draft.stream.stopped_by
    assert finished is not None
    return Sample(
        text=draft.text,
        token_ids=finished.token_ids,
        finish_reason="stop" if stopped_by is not None else finished.reason,
        stopped_by=stopped_by if stopped_by is not None else finished.stopped_by,
        logprobs=draft.logprobs if has_logprobs else None,
    )
