"""What a call for answers reads: a Stream in loops and threads, an AsyncStream in asyncio.

The law: a stream never keeps others waiting. Any thread may read, abort or close it at any moment,
and what was asked by one that is closed, cancelled or dropped is computed no further. A step serves
all streams, whoever takes it. Read next: engine.py for steps and events; run.py, which makes
streams of prompts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress

import attrs

from nva.engine import Engine, post, read, send, settle, step, thread_of
from nva.state.engine import is_busy
from nva.state.events import Abort, Arrive
from nva.text.answers import Completion, StreamEvent, Transcript


@attrs.define(eq=False, repr=False)
class Stream(Iterator[StreamEvent]):
    """The answers to one call, as they come: TextDelta of every sample, and each prompt's
    Completion at its end.

    The requests are queued when the first event is asked for. abort() and close() may be called
    from any thread, also while another reads. A `with` block closes the stream at its end."""

    engine: Engine
    transcripts: Sequence[Transcript]  # of its requests, as they were before anything was told
    _n_open: int = attrs.field(init=False)  # Completions to come
    _events: deque[StreamEvent] = attrs.field(factory=deque[StreamEvent], init=False)  # unread
    _is_queued: bool = attrs.field(default=False, init=False)
    _is_aborted: bool = attrs.field(default=False, init=False)
    _is_closed: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._n_open = len(self.transcripts)

    def __next__(self) -> StreamEvent:
        try:
            while self.is_open:
                event = self.pop()
                if event is not None:
                    return event
                self.fetch()
        except BaseException:  # as with a generator, nothing comes after an error
            self.close()
            raise
        raise StopIteration

    def abort(self) -> None:
        """End what is unanswered. Its Completions come now, with the tokens so far and
        finish_reason "abort"."""
        self.post_abort()
        settle(self.engine)

    def close(self) -> None:
        """End what is unanswered, and read no more."""
        self.post_close()
        settle(self.engine)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    # What an AsyncStream is made of, too.

    @property
    def is_open(self) -> bool:
        """Whether events are unread, or to come."""
        return not self._is_closed and (bool(self._events) or self._n_open > 0)

    def pop(self) -> StreamEvent | None:
        """The next event that was fetched, if there is one."""
        with suppress(IndexError):
            return self._events.popleft()
        return None

    def fetch(self) -> None:
        """Fetch the events that the engine has for this stream. If it has none, take a step."""
        engine = self.engine
        with engine.lock:
            if not self._is_queued and self.is_open:
                self._queue()
            if self._is_closed or self._n_open <= 0:  # by another thread, while this one waited
                return
            was_busy = is_busy(engine.state)
            events = read(engine, self._call)
            if not events and not was_busy:
                raise RuntimeError(
                    "the engine's state was replaced while requests were unanswered, and has lost "
                    "them; change it by nva.engine.send, or close its streams before"
                )
            if not events:
                if is_busy(engine.state):  # else what was left was aborted just now
                    step(engine)
                events = read(engine, self._call)
            self._n_open -= sum(isinstance(event, Completion) for event in events)
            self._events.extend(events)

    def post_abort(self) -> None:
        """abort(), at the next settle()."""
        self._is_aborted = True
        if self._is_queued and self._n_open > 0:
            post(self.engine, self._abort)

    def post_close(self) -> None:
        """close(), at the next settle()."""
        self._is_closed = True
        if self._is_queued and self._n_open > 0:
            post(self.engine, self._abort, closed=self._call)
            self._n_open = 0

    def _queue(self) -> None:
        """Have the requests arrive. Who aborts or closes meanwhile may have come too early."""
        self._is_queued = True  # now, so that after an interrupt close() finds them
        try:
            arrival = Arrive([each.request for each in self.transcripts])
            send(self.engine, arrival, self.transcripts)
        except ValueError:
            self._is_queued = False
            raise
        if self._is_aborted:
            post(self.engine, self._abort)
        if self._is_closed:
            post(self.engine, self._abort, closed=self._call)
        settle(self.engine)

    @property
    def _abort(self) -> Abort:
        return Abort(each.request.id for each in self.transcripts)

    @property
    def _call(self) -> int:
        return self.transcripts[0].call


@attrs.define(eq=False, repr=False)
class AsyncStream(AsyncIterator[StreamEvent]):
    """The same for asyncio: `async for event in nva.astream(...)`. Prompts are encoded and steps
    taken in threads, so the loop goes on meanwhile.

    Cancelling who reads closes the stream, as does the end of an `async with` block. Bad input
    raises when the first event is asked for."""

    engine: Engine
    make: Callable[[], Stream]
    _stream: Stream | None = attrs.field(default=None, init=False)
    _is_aborted: bool = attrs.field(default=False, init=False)
    _is_closed: bool = attrs.field(default=False, init=False)

    async def __anext__(self) -> StreamEvent:
        try:
            stream = self._stream or await self._open()
            while stream.is_open and not self._is_closed:
                event = stream.pop()
                if event is not None:
                    return event
                # One thread serves all: who asks first has a step taken, the others find what it
                # told them.
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(thread_of(self.engine), stream.fetch)
        except BaseException:  # cancelled, perhaps
            self.close()
            raise
        raise StopAsyncIteration

    def abort(self) -> None:
        """End what is unanswered. Its Completions come now, with the tokens so far and
        finish_reason "abort". From any thread; never waits."""
        self._is_aborted = True
        if self._stream is not None:
            self._stream.post_abort()
            self._settle()

    def close(self) -> None:
        """End what is unanswered, and read no more. From any thread; never waits."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.post_close()
            self._settle()

    async def aclose(self) -> None:
        """close(), and wait until it is done."""
        self.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(thread_of(self.engine), settle, self.engine)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # Not close(): the garbage collector may come while this thread starts another.
        if self._stream is not None:
            self._stream.close()

    async def _open(self) -> Stream:
        made = await asyncio.to_thread(self.make)
        if self._stream is None:  # else another task was faster
            self._stream = made
        if self._is_aborted:
            self._stream.post_abort()
        return self._stream

    def _settle(self) -> None:
        """Settle in the thread of steps."""
        if self.engine.posted:
            with suppress(RuntimeError):  # at the interpreter's end no thread takes more work
                thread_of(self.engine).submit(settle, self.engine)
