"""What changes a state beside a step: requests arrive or are aborted, a sample stops or is forked.

The law: an event is a value that says all there is to say. So a run is a list of events and of
sampled tokens: it can be recorded, sent, and replayed without a model. Read next: steps/apply.py,
which gives each event its meaning."""

from __future__ import annotations

import attrs

from nva.state.request import Finished, Request

RequestId = int | str


@attrs.frozen
class Arrive:
    """Requests are submitted together: all of them are queued, or none."""

    requests: tuple[Request, ...] = attrs.field(converter=tuple[Request, ...])


@attrs.frozen
class Abort:
    """All samples of these requests end now. Ids that are not in flight are passed over."""

    ids: frozenset[RequestId] = attrs.field(converter=frozenset[RequestId])


@attrs.frozen(kw_only=True)
class Stop:
    """One sample ends, because its text holds a stop string. One that has ended is passed over."""

    id: RequestId  # of its request
    sample: int
    text: str  # the stop string


@attrs.frozen(kw_only=True)
class Fork:
    """`n` more samples go on as this one does, from the tokens that it has so far."""

    id: RequestId  # of its request
    sample: int
    n: int = 1
    first_sample: int | None = None  # their first number; by default one that no sample has


Event = Arrive | Abort | Stop | Fork


@attrs.frozen(kw_only=True)
class Told:
    """What an event brought: the samples that it ended, and the rows that it made."""

    finished: tuple[Finished, ...] = ()
    rows: tuple[int, ...] = ()
