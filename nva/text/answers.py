"""What requests have been answered so far, and the events in which whoever asked reads it, a
Completion the last.

The law: answers are a value. `deliver` makes the next of a step's output, so a step that raises has
told nothing, and a step that ends has told all of it, whoever called for the step. It changes no
state: where a text holds a stop string it gives a Stop, for the engine to apply. Read next:
engine.py, which keeps the answers; streams.py, which reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs

from nva.state.columns import evolve
from nva.state.events import RequestId, Stop
from nva.state.lookup import Lookup
from nva.state.plan import Output, TokenLogprobs
from nva.state.request import Finished, FinishReason, Request
from nva.text.detokenize import Detokenizer, TextStream, finish, read, text_stream

# 1. What users see.


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
    # One per prompt token, None for the first, if asked for.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None

    @property
    def n_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def text(self) -> str:
        """The text, before the stop string or stop token that ended it."""
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids drawn, a stop token included."""
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended: "stop", "length" or "abort"."""
        return self.samples[0].finish_reason

    @property
    def stopped_by(self) -> int | str | None:
        """The token id or string that ended it; None for "length" and "abort"."""
        return self.samples[0].stopped_by

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities, one per token id, if asked for."""
        return self.samples[0].logprobs


StreamEvent = TextDelta | Completion

# 2. What is kept until then.


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
    call: int  # the number of that call
    drafts: tuple[Draft, ...]  # one per sample
    scores: Mapping[int, TokenLogprobs] = attrs.field(factory=dict[int, TokenLogprobs])
    # ^ log-probabilities of the prompt's tokens, by position

    @property
    def is_answered(self) -> bool:
        """Whether every sample has ended."""
        return all(draft.finished is not None for draft in self.drafts)


Unread = tuple[Any, Sequence[StreamEvent]]
"""Events that a call has not read: those before (Unread or None), and the newest. So telling
costs the same however much is unread."""


@attrs.frozen(kw_only=True)
class Answers:
    """The transcripts of requests that are not answered in full, by request id, and the events
    that are unread, by call.

    A request without a transcript, such as one submitted by hand, has nobody who reads its answer.
    """

    transcripts: Lookup[RequestId, Transcript] = attrs.field(factory=Lookup[RequestId, Transcript])
    unread: Lookup[int, Unread] = attrs.field(factory=Lookup[int, Unread])


def transcript(request: Request, index: int, call: int, detokenizer: Detokenizer) -> Transcript:
    """The transcript of a request that was told nothing yet. Raises ValueError as text_stream()
    does."""
    stream = text_stream(detokenizer, request.params.stop, request.params.min_tokens)
    drafts = (Draft(stream=stream),) * request.params.n
    return Transcript(request=request, index=index, call=call, drafts=drafts)


def expect(answers: Answers, transcripts: Collection[Transcript]) -> Answers:
    """The answers, with those that are still to come."""
    return _with_transcripts(answers, {each.request.id: each for each in transcripts})


def forget(answers: Answers, call: int, ids: Collection[RequestId]) -> Answers:
    """The answers without a call, whose requests these are."""
    return Answers(
        transcripts=answers.transcripts.updated(dict.fromkeys(ids)),
        unread=answers.unread.updated({call: None}),
    )


def take_events(answers: Answers, call: int) -> tuple[Answers, list[StreamEvent]]:
    """The call's unread events, oldest first, which are read with that."""
    left = answers.unread.get(call)
    if left is None:
        return answers, []
    pieces: list[Sequence[StreamEvent]] = []
    while left is not None:
        left, newest = left
        pieces.append(newest)
    events = [event for piece in reversed(pieces) for event in piece]
    return attrs.evolve(answers, unread=answers.unread.updated({call: None})), events


def deliver(answers: Answers, output: Output) -> tuple[Answers, list[Stop]]:
    """The answers with a step's output, and a Stop for each sample that goes on in the state though
    its text holds a stop string."""
    if output.scores:
        answers = _scored(answers, output)

    # 1. Each sample's token is read into its text.
    ended = {(each.request.id, each.sample): each.reason for each in output.finished}
    known = answers.transcripts.among({request.id for request in output.requests})
    told: dict[int, list[StreamEvent]] = defaultdict(list)
    stops: list[Stop] = []
    samples: list[int] = output.samples.tolist()
    tokens: list[int] = output.tokens.tolist()
    columns = zip(output.requests, samples, tokens, output.logprobs, strict=True)
    for request, sample, token, logprobs in columns:
        before = known.get(request.id)
        if before is None or sample >= len(before.drafts):  # nobody reads it, or it is a fork
            continue
        has_text = ended.get((request.id, sample)) != "stop"
        after, delta = _written(before, sample, token, logprobs, has_text)
        known[request.id] = after
        told[after.call].append(delta)
        text = after.drafts[sample].stream.stopped_by
        if text is not None and (request.id, sample) not in ended:
            stops.append(Stop(id=request.id, sample=sample, text=text))
    answers = _told(_with_transcripts(answers, known), told)

    # 2. Samples that the step ended are closed.
    return end(answers, output.finished), stops


def end(answers: Answers, finished: Collection[Finished]) -> Answers:
    """The answers when these samples have ended: the text held back is due, and with a request's
    last sample its Completion."""
    if not finished:
        return answers
    known = answers.transcripts.among({each.request.id for each in finished})
    told: dict[int, list[StreamEvent]] = defaultdict(list)
    for each in finished:
        before = known.get(each.request.id)
        if before is None or each.sample >= len(before.drafts):
            continue
        after, events = _closed(before, each)
        known[each.request.id] = after
        told[after.call] += events
    # Who is answered in full leaves.
    changes = {id_: None if each.is_answered else each for id_, each in known.items()}
    return _told(_with_transcripts(answers, changes), told)


def _with_transcripts(answers: Answers, changes: Mapping[RequestId, Transcript | None]) -> Answers:
    return attrs.evolve(answers, transcripts=answers.transcripts.updated(changes))


def _told(answers: Answers, told: Mapping[int, Sequence[StreamEvent]]) -> Answers:
    """The answers with more unread events of these calls."""
    unread = {call: (answers.unread.get(call), events) for call, events in told.items() if events}
    return attrs.evolve(answers, unread=answers.unread.updated(unread))


def _scored(answers: Answers, output: Output) -> Answers:
    """The answers with the log-probabilities of prompts' tokens."""
    scores: dict[RequestId, dict[int, TokenLogprobs]] = defaultdict(dict)
    for request, position, logprobs in output.scores:
        scores[request.id][position] = logprobs
    known = answers.transcripts.among(scores)
    changes = {
        id_: evolve(each, scores={**each.scores, **scores[id_]}) for id_, each in known.items()
    }
    return _with_transcripts(answers, changes)


def _written(
    before: Transcript, sample: int, token: int, logprobs: TokenLogprobs | None, has_text: bool
) -> tuple[Transcript, TextDelta]:
    """Add a token to a sample; one that stops it has no text."""
    draft = before.drafts[sample]
    stream, text = read(draft.stream, [token]) if has_text else (draft.stream, "")
    entries = draft.logprobs if logprobs is None else (*draft.logprobs, logprobs)
    draft = evolve(draft, stream=stream, text=draft.text + text, logprobs=entries)
    delta = TextDelta(index=before.index, sample=sample, text=text, token_ids=(token,))
    return _with_draft(before, sample, draft), delta


def _closed(before: Transcript, finished: Finished) -> tuple[Transcript, list[StreamEvent]]:
    """End a sample: the text held back, and after the last sample the Completion."""
    sample = finished.sample
    draft = before.drafts[sample]
    stream, text = finish(draft.stream)
    draft = evolve(draft, stream=stream, text=draft.text + text, finished=finished)
    after = _with_draft(before, sample, draft)
    events: list[StreamEvent] = []
    if text:
        events.append(TextDelta(index=before.index, sample=sample, text=text, token_ids=()))
    if after.is_answered:
        events.append(_completion(after))
    return after, events


def _with_draft(before: Transcript, sample: int, draft: Draft) -> Transcript:
    drafts = (*before.drafts[:sample], draft, *before.drafts[sample + 1 :])
    return evolve(before, drafts=drafts)


def _completion(transcript: Transcript) -> Completion:
    params = transcript.request.params
    prompt = tuple(transcript.request.prompt.tolist())
    has_logprobs = params.logprobs is not None
    has_scores = params.prompt_logprobs is not None
    scores = tuple(transcript.scores.get(position) for position in range(len(prompt)))
    first = transcript.drafts[0].finished
    assert first is not None
    return Completion(
        index=transcript.index,
        prompt_token_ids=prompt,
        n_cached_tokens=first.n_cached,
        samples=tuple(_sample(draft, has_logprobs) for draft in transcript.drafts),
        prompt_logprobs=scores if has_scores else None,
    )


def _sample(draft: Draft, has_logprobs: bool) -> Sample:
    """A sample that has ended. A stop string that its last text completes is its reason, whatever
    ended it."""
    finished = draft.finished
    assert finished is not None
    found = draft.stream.stopped_by
    return Sample(
        text=draft.text,
        token_ids=finished.token_ids,
        finish_reason="stop" if found is not None else finished.reason,
        stopped_by=found if found is not None else finished.stopped_by,
        logprobs=draft.logprobs if has_logprobs else None,
    )
