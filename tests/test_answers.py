"""Answers are a value, and telling a token costs the same however many requests wait and however
much is unread."""

import time

import numpy as np
import pytest

import nva
from nva.state.events import Stop
from nva.state.plan import Output
from nva.state.request import Finished, request
from nva.text.answers import Answers, deliver, end, expect, forget, take_events, transcript
from tests.toy_engine import toy_engine

DETOKENIZER = toy_engine().detokenizer


def asked(id_, **params):
    return request(id_, [1, 2], nva.SamplingParams(temperature=0, **params))


def waiting(n: int, **params) -> Answers:
    """So many requests of one call, nothing told yet."""
    requests = [asked(id_, **params) for id_ in range(n)]
    return expect(Answers(), [transcript(each, each.id, 0, DETOKENIZER) for each in requests])


def output(tokens: dict[int, int], answers: Answers | None = None, **fields) -> Output:
    """A token for each of these requests."""
    requests = [answers.transcripts[id_].request if answers else asked(id_) for id_ in tokens]
    return Output(
        requests=requests,
        samples=np.zeros(len(tokens), np.int32),
        tokens=np.array([*tokens.values()], np.int32),
        logprobs=[None] * len(tokens),
        **fields,
    )


def texts(answers: Answers, call: int = 0) -> list[tuple[int, str]]:
    return [(event.index, event.text) for event in take_events(answers, call)[1]]


def test_answers_are_a_value() -> None:
    first = waiting(2)
    second, stops = deliver(first, output({0: 3, 1: 4}, first))
    third, _ = deliver(second, output({1: 5}, first))
    other, _ = deliver(second, output({0: 6}, first))
    assert stops == []
    assert [texts(each) for each in (first, second, third, other, second)] == [
        [],
        [(0, "d"), (1, "e")],
        [(0, "d"), (1, "e"), (1, "f")],
        [(0, "d"), (1, "e"), (0, "g")],
        [(0, "d"), (1, "e")],
    ]
    read, events = take_events(third, 0)
    assert len(events) == 3 and texts(read) == [] and len(texts(third)) == 3
    assert [len(forget(third, 0, [0]).transcripts), len(third.transcripts)] == [1, 2]


def test_a_stop_string_is_a_stop_for_the_engine_to_apply() -> None:
    """The answers change when the state has, and the sample is told once."""
    answers = waiting(1, stop="de")
    answers, stops = deliver(answers, output({0: 3}, answers))
    assert stops == []
    answers, stops = deliver(answers, output({0: 4}, answers))
    assert stops == [Stop(id=0, sample=0, text="de")]
    assert 0 in answers.transcripts
    ended = Finished(
        request=answers.transcripts[0].request,
        sample=0,
        reason="stop",
        stopped_by="de",
        token_ids=(3, 4),
        n_cached=0,
    )
    answers = end(answers, [ended])
    assert len(answers.transcripts) == 0
    *_, last = take_events(answers, 0)[1]
    assert (last.text, last.finish_reason, last.stopped_by) == ("", "stop", "de")


def test_a_sample_that_its_stop_string_and_its_length_end_needs_no_stop() -> None:
    answers = waiting(1, stop="d", max_tokens=1)
    ended = Finished(
        request=answers.transcripts[0].request,
        sample=0,
        reason="length",
        stopped_by=None,
        token_ids=(3,),
        n_cached=0,
    )
    answers, stops = deliver(answers, output({0: 3}, answers, finished=[ended]))
    assert stops == []
    assert take_events(answers, 0)[1][-1].stopped_by == "d"


def test_what_nobody_reads_is_passed_over() -> None:
    """A request submitted by hand, and a sample that was forked by hand."""
    answers = waiting(1)
    assert texts(deliver(answers, output({5: 3}))[0]) == []
    forked = output({0: 3}, answers)
    forked.samples.setflags(write=True)
    forked.samples[0] = 7
    assert texts(deliver(answers, forked)[0]) == []


def test_the_properties_are_those_of_the_first_sample() -> None:
    (answer,) = nva.generate(toy_engine(), "abc", nva.SamplingParams(max_tokens=4, logprobs=0))
    sample = answer.samples[0]
    assert answer.n_prompt_tokens == len(answer.prompt_token_ids) == 3
    for name in ("text", "token_ids", "finish_reason", "stopped_by", "logprobs"):
        assert getattr(answer, name) == getattr(sample, name)
        assert getattr(nva.Completion, name).__doc__
        assert getattr(nva.Completion, name).fget.__annotations__["return"]


def seconds(function) -> float:
    """The least of many calls."""
    times = []
    for _ in range(60):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("kind", ["waiting", "unread"])
def test_telling_a_token_costs_the_same_however_much_waits(kind) -> None:
    def cost(n: int) -> float:
        answers = waiting(n if kind == "waiting" else 8)
        brought = output(dict.fromkeys(range(8), 3), answers)
        for _ in range(n // 8 if kind == "unread" else 0):
            answers, _ = deliver(answers, brought)
        if kind == "unread":
            return seconds(lambda: deliver(answers, brought))
        return seconds(lambda: take_events(deliver(answers, brought)[0], 0))

    assert cost(20_000) < 4 * cost(20)
