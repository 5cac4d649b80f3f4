"""Streams for asyncio and threads: who is cancelled, aborted or closed, at any moment, takes its rows
along, holds nobody up and loses nobody's answers."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

import nva
from nva.engine import send
from nva.state.engine import check, is_busy
from nva.state.events import Abort
from tests.toy_engine import LIMITS, expected, prompts_of, toy_engine

SHORT = nva.SamplingParams(max_tokens=6)
LONG = nva.SamplingParams(max_tokens=200)


def settled(engine: nva.Engine) -> None:
    """Fail unless the engine is idle soon, with nothing left of anyone."""
    for _ in range(400):
        with engine.lock:
            if not engine.posted and not is_busy(engine.state):
                break
        time.sleep(0.01)
    assert not is_busy(engine.state)
    assert list(engine.posted) == [] and engine.before is None
    assert len(engine.answers.transcripts) == len(engine.answers.unread) == 0
    assert engine.state.blocks.n_free == engine.state.limits.n_blocks
    check(engine.state)


async def text_of(engine: nva.Engine, prompt: str, params=SHORT) -> str:
    events = [event async for event in nva.astream(engine, prompt, params)]
    assert isinstance(events[-1], nva.Completion)
    assert "".join(event.text for event in events[:-1]) == events[-1].text
    return events[-1].text


def test_async_streams_answer_as_alone_and_share_steps() -> None:
    engine, steps = toy_engine(), []
    engine.observe = lambda part, result: (steps.append(part), result)[1]
    prompts = prompts_of(20)

    async def main():
        return await asyncio.gather(*(text_of(engine, prompt) for prompt in prompts))

    assert asyncio.run(main()) == [expected(prompt, 6) for prompt in prompts]
    assert steps.count("forward") < 60  # 20 times 6 if none were shared; 8 rows, so at least 18
    settled(engine)


def test_the_loop_goes_on_while_a_step_is_taken() -> None:
    engine = toy_engine(seconds=0.2)
    gaps = []

    async def watch():
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            gaps.append(time.perf_counter() - before)

    async def main():
        watching = asyncio.create_task(watch())
        await text_of(engine, "abc", nva.SamplingParams(max_tokens=3))
        watching.cancel()

    asyncio.run(main())
    assert len(gaps) > 20  # in 0.6 s; a loop that waits for steps comes to 4 or so


@pytest.mark.parametrize("delay", [0, 0.0005, 0.002, 0.01, 0.03, 0.1])
def test_who_is_cancelled_at_any_moment_takes_its_row_along(delay) -> None:
    """While its prompt is encoded, before and within its first step, between and within others."""
    engine = toy_engine(seconds=0.005)

    async def main():
        other = asyncio.create_task(text_of(engine, "abc"))
        task = asyncio.create_task(text_of(engine, "cba", LONG))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await other == expected("abc", 6)

    asyncio.run(main())
    settled(engine)


def test_a_timeout_aborts_and_others_go_on() -> None:
    engine = toy_engine(seconds=0.005)

    async def main():
        other = asyncio.create_task(text_of(engine, "abc", nva.SamplingParams(max_tokens=40)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await text_of(engine, "cba", LONG)
        await asyncio.sleep(0.05)
        assert int(engine.state.rows.is_running.sum()) == 1
        assert await other == expected("abc", 40)

    asyncio.run(main())
    settled(engine)


def test_leaving_an_async_loop_early_ends_the_request() -> None:
    engine = toy_engine()

    async def main():
        async for _ in nva.astream(engine, "abc", LONG):
            break
        await asyncio.sleep(0.05)
        assert not is_busy(engine.state)
        async with nva.astream(engine, "abc", LONG) as events:
            await anext(events)
            assert is_busy(engine.state)
        assert not is_busy(engine.state)  # the block's end waits
        with pytest.raises(StopAsyncIteration):
            await anext(events)
        await events.aclose()

    asyncio.run(main())
    settled(engine)


def test_an_async_reader_is_told_of_its_abort() -> None:
    engine = toy_engine(seconds=0.002)

    async def main():
        events, found = nva.astream(engine, ["abc", "cba"], LONG), []

        async def read():
            async for event in events:
                found.append(event)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        events.abort()
        await asyncio.wait_for(reading, 5)
        return found

    *deltas, first, second = asyncio.run(main())
    assert {first.index, second.index} == {0, 1}
    for answer in (first, second):
        assert answer.finish_reason == "abort"
        assert 0 < len(answer.token_ids) < 200
        assert answer.text == expected(["abc", "cba"][answer.index], len(answer.token_ids))
        told = [d.text for d in deltas if d.index == answer.index]
        assert "".join(told) == answer.text
    settled(engine)


def test_bad_input_raises_where_the_first_event_is_asked_for() -> None:
    engine = toy_engine()

    async def main():
        with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
            await text_of(engine, ["abc", ""])
        with pytest.raises(ValueError, match="params is 5"):
            await text_of(engine, "abc", 5)

    asyncio.run(main())
    settled(engine)


def test_a_failing_step_ends_the_stream_that_took_it_alone() -> None:
    engine = toy_engine(seconds=0.002)
    forward, calls = engine.forward, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 5:
            raise RuntimeError("out of memory")
        return forward(*args)

    engine.forward = failing
    prompts = prompts_of(4)

    async def main():
        tasks = [text_of(engine, prompt) for prompt in prompts]
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(main())
    assert [str(each) for each in found if isinstance(each, Exception)] == ["out of memory"]
    for text, prompt in zip(found, prompts, strict=True):
        assert isinstance(text, Exception) or text == expected(prompt, 6)
    settled(engine)


def test_loops_of_several_threads_share_an_engine() -> None:
    engine = toy_engine(seconds=0.001)
    prompts = prompts_of(6)
    with ThreadPoolExecutor(6) as threads:
        tasks = [
            threads.submit(asyncio.run, text_of(engine, prompt))
            if number % 2
            else threads.submit(lambda prompt: nva.generate(engine, prompt, SHORT)[0].text, prompt)
            for number, prompt in enumerate(prompts)
        ]
        assert [task.result(20) for task in tasks] == [expected(prompt, 6) for prompt in prompts]
    settled(engine)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_stream_is_ended_from_another_thread_while_it_is_read(end) -> None:
    """The thread that reads is within a step, as with asyncio.to_thread(next, stream)."""
    engine = toy_engine(seconds=0.05)
    events, found = nva.stream(engine, "abc", LONG), []
    reading = threading.Thread(target=lambda: found.extend(events))
    reading.start()
    time.sleep(0.12)
    before = time.perf_counter()
    getattr(events, end)()
    assert time.perf_counter() - before < 0.04  # it doesn't wait for the step
    reading.join(5)
    assert not reading.is_alive()
    last = found[-1]
    assert isinstance(last, nva.Completion) == (end == "abort")
    assert end == "close" or (last.finish_reason, last.text) == (
        "abort",
        expected("abc", len(last.token_ids)),
    )
    settled(engine)


def test_a_stream_that_was_ended_before_it_was_read() -> None:
    engine = toy_engine()
    events = nva.stream(engine, ["abc", "cba"], LONG)
    events.abort()
    assert [(each.finish_reason, each.token_ids) for each in events] == [("abort", ())] * 2
    events = nva.stream(engine, "abc", LONG)
    events.close()
    assert list(events) == []
    events.abort()
    settled(engine)


def test_a_stream_is_ended_in_the_midst_of_its_queueing() -> None:
    """Another thread closes or aborts it when its requests are about to arrive, or just have."""
    for end in ("close", "abort"):
        for moment in (0, 1):
            engine = toy_engine()
            events = nva.stream(engine, "abc", LONG)
            apply = []

            def observe(part, result, events=events, end=end, moment=moment, apply=apply):
                apply.append(part)
                if apply == (["event"], ["event", "schedule"])[moment]:
                    ending = threading.Thread(target=getattr(events, end))
                    ending.start()
                    ending.join(5)
                    assert not ending.is_alive()
                return result

            engine.observe = observe
            found = list(events)
            assert [each.finish_reason for each in found if isinstance(each, nva.Completion)] == (
                ["abort"] if end == "abort" else []
            )
            settled(engine)


def test_an_abort_by_id_is_told_to_who_reads() -> None:
    engine = toy_engine()
    events = nva.stream(engine, ["abc", "cba"], SHORT)
    next(events)
    id_ = events.transcripts[0].request.id
    (told,) = send(engine, Abort([id_])).finished
    assert told.request.id == id_
    answers = sorted((e for e in events if isinstance(e, nva.Completion)), key=lambda e: e.index)
    assert [answer.finish_reason for answer in answers] == ["abort", "length"]
    assert answers[1].text == expected("cba", 6)
    settled(engine)


def test_a_stream_that_is_dropped_ends() -> None:
    engine = toy_engine()
    events = nva.stream(engine, "abc", LONG)
    next(events)
    ring = [events]
    ring.append(ring)  # only the garbage collector finds it
    del events, ring
    gc.collect()
    settled(engine)


def test_a_stream_collected_at_any_moment_of_a_change_ends_and_harms_none() -> None:
    """The collector comes in the midst of whatever allocates: within a step, an arrival, a read."""
    engine = toy_engine()
    threshold = gc.get_threshold()
    gc.set_threshold(3)
    try:
        for number in range(30):
            doomed = nva.stream(engine, "abc", LONG)
            next(doomed)
            ring = [doomed]
            ring.append(ring)
            del doomed, ring
            prompt = prompts_of(30)[number]
            assert nva.generate(engine, prompt, SHORT)[0].text == expected(prompt, 6)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    settled(engine)


def test_many_threads_read_close_and_abort_at_random() -> None:
    engine = toy_engine(seconds=0.0005)

    def one(number: int) -> str:
        prompt = prompts_of(48)[number]
        events = nva.stream(engine, prompt, attrs.evolve(SHORT, max_tokens=20))
        if number % 3:
            timer = threading.Timer(number * 0.002, [events.close, events.abort][number % 3 - 1])
            timer.start()
        answers = [event for event in events if isinstance(event, nva.Completion)]
        for answer in answers:
            assert answer.text == expected(prompt, len(answer.token_ids))
            assert answer.finish_reason == "abort" or len(answer.token_ids) == 20
        assert answers or number % 3 == 1
        return "ok"

    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(one, range(48), timeout=60)) == ["ok"] * 48
    settled(engine)


def test_two_threads_read_one_stream() -> None:
    """Each event goes to one of them."""
    engine = toy_engine(attrs.evolve(LIMITS, max_rows=2), seconds=0.0005)
    events = nva.stream(engine, prompts_of(6), SHORT)
    with ThreadPoolExecutor(2) as threads:
        parts = list(threads.map(list, [events, events]))
    found = [event for part in parts for event in part]
    assert sorted(each.index for each in found if isinstance(each, nva.Completion)) == [*range(6)]
    assert len(found) == 6 * 7
    settled(engine)


def test_a_state_replaced_under_a_stream_is_an_error_and_no_endless_loop() -> None:
    engine = toy_engine()
    state, events = engine.state, nva.stream(engine, "abc", LONG)
    next(events)
    engine.state = state
    with pytest.raises(RuntimeError, match="replaced while requests were unanswered"):
        list(events)
    settled(engine)


def test_a_program_that_ends_within_streams_ends_quietly() -> None:
    program = """
import asyncio, nva
from tests.toy_engine import toy_engine
engine = toy_engine()
left = nva.stream(engine, "abc")
next(left)
async def main():
    global other
    other = nva.astream(engine, "abc")
    await anext(other)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    program = """
import asyncio, os, nva
from tests.toy_engine import expected, toy_engine
engine = toy_engine()
async def text(prompt):
    return [e async for e in nva.astream(engine, prompt, nva.SamplingParams(max_tokens=4))][-1].text
assert asyncio.run(text("abc")) == expected("abc", 4)
child = os.fork()
if child == 0:
    os._exit(0 if asyncio.run(text("cba")) == expected("cba", 4) else 1)
assert os.waitpid(child, 0)[1] == 0
assert asyncio.run(text("bca")) == expected("bca", 4)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_waits_for_locks_in_whatever_order_others_take_them() -> None:
    """A prompt is encoded under one lock, and what its image needs imported under another."""
    program = """
import os, threading, time
from nva.host import forks
forks.survive_forks()
locks = [forks.lock_across_forks() for _ in range(4)]
holding = threading.Event()
def hold(order):
    with order[0]:
        holding.set()
        time.sleep(0.2)
        with order[1], order[2], order[3]:
            pass
for order in (sorted(locks, key=id), sorted(locks, key=id)[::-1]):
    holding.clear()
    thread = threading.Thread(target=hold, args=(order,))
    thread.start()
    holding.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if all(lock.acquire(blocking=False) for lock in locks) else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join(5)
    assert not thread.is_alive()
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
