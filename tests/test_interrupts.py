"""Ctrl-C anywhere, and again while the first is being handled: nothing is lost, nothing told twice."""

import linecache
import sys
from contextlib import contextmanager

import attrs
import pytest

import nva
from nva import engine as engine_module
from nva.state.engine import check, is_busy
from tests.toy_engine import LIMITS, expected, toy_engine

PARAMS = nva.SamplingParams(max_tokens=12, logprobs=0, min_tokens=1, stop="@")
SMALL = attrs.evolve(LIMITS, n_blocks=12, max_rows=4)  # so that a step takes cached blocks


def interrupted() -> None:
    raise KeyboardInterrupt


class Interrupter:
    """Raises KeyboardInterrupt, or does something else, at the n-th line that nva's code runs after
    start()."""

    def __init__(self, line: int, act=interrupted) -> None:
        self.left, self.is_done, self.act = line, False, act

    def start(self) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            if "/nva/" in frame.f_code.co_filename:
                frame.f_trace = self.trace
            frame = frame.f_back
        sys.settrace(self.trace)

    def trace(self, frame, event, _):
        if "/nva/" not in frame.f_code.co_filename or self.is_done:
            return None
        if event == "line" and not is_with(frame):
            self.left -= 1
            if self.left <= 0:
                self.is_done = True
                sys.settrace(None)
                self.act()
        return self.trace


def is_with(frame) -> bool:
    """Whether a `with` is entered or left here. Python handles no signal between the two calls of it
    and its block, where this could raise."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith("with ")


@contextmanager
def untraced():
    before = sys.gettrace()
    try:
        yield
    finally:
        sys.settrace(before)


def served_beside_one_that_is_interrupted(interrupt) -> int:
    """Whether reading one stream was interrupted while another is served, which must not notice."""
    engine = toy_engine(SMALL)
    nva.generate(engine, ["gfedcbagfe", "abcabcabca"], PARAMS)  # leaves blocks that are cached
    other, dying = nva.stream(engine, "abc", PARAMS), nva.stream(engine, "gfedcbagfe", PARAMS)
    events = [next(other)]
    interrupt(engine)
    was_interrupted = False
    with untraced():
        try:
            next(dying)
        except KeyboardInterrupt:
            was_interrupted = True
    engine.observe = engine_module.unobserved
    dying.close()
    del dying
    events += other
    assert events[-1].text == expected("abc", 12)
    assert "".join(event.text for event in events[:-1]) == events[-1].text
    assert not is_busy(engine.state) and engine.before is None and not engine.posted
    assert len(engine.answers.transcripts) == len(engine.answers.unread) == 0
    check(engine.state)
    assert nva.generate(engine, "gfedcbagfe", PARAMS)[0].text == expected("gfedcbagfe", 12)
    return was_interrupted


@pytest.mark.parametrize("line", range(1, 700, 7))
def test_an_interrupt_at_any_line_of_reading_loses_nothing(line) -> None:
    """From the call for an event on: the arrival, the step, what it tells."""
    was_interrupted = served_beside_one_that_is_interrupted(lambda _: Interrupter(line).start())
    assert was_interrupted or line > 300


@pytest.mark.parametrize("part", ["schedule", "pack", "forward", "sample", "commit"])
@pytest.mark.parametrize("line", range(1, 140, 9))
def test_a_second_interrupt_while_the_first_is_taken_back_loses_nothing(part, line) -> None:
    def interrupt(engine):
        second = Interrupter(line)

        def observe(seen, result):
            if seen == part and not second.is_done:
                engine.observe = engine_module.unobserved
                second.start()
                raise KeyboardInterrupt
            return result

        engine.observe = observe

    assert served_beside_one_that_is_interrupted(interrupt)


@pytest.mark.parametrize("line", range(1, 400, 5))
def test_a_signal_handler_that_closes_a_stream_anywhere_ends_it(line) -> None:
    """Within an arrival, a step, a read, an abort of another stream: whatever this thread is at."""
    engine = toy_engine(SMALL)
    other, doomed = (nva.stream(engine, prompt, PARAMS) for prompt in ("abc", "gfedcbagfe"))
    closing, reading = nva.stream(engine, "cba", PARAMS), nva.stream(engine, "bca", PARAMS)
    events = [next(other)]
    next(doomed), next(closing)
    with untraced():
        Interrupter(line, act=doomed.close).start()
        closing.close()
        read = list(reading)
    doomed.close()
    assert read[-1].text == expected("bca", 12)
    events += other
    assert events[-1].text == expected("abc", 12)
    assert not is_busy(engine.state) and engine.before is None and not engine.posted
    assert len(engine.answers.transcripts) == len(engine.answers.unread) == 0
    check(engine.state)
