"""The engine's loop by hand, and a scheduling policy of one's own: Ann asks six things at once,
then Bob asks one.

    python examples/compose.py [--model FOLDER]

First come, first served: Bob waits for Ann's answers, all but the last. Fair queueing: he waits for
one. The tokens are the same; only the policy differs, and a policy is a value: a state of its own
and a pure function that ranks a request."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import nva
from nva.loop import step
from nva.state.engine import empty, is_busy
from nva.state.plan import Output
from nva.state.policy import Policy, first_come_first_served
from nva.state.request import Request, request
from nva.steps.submit import submit

Served = dict[str, float]  # user, as the request's tag says -> tokens asked for so far


def fair_step(served: Served, request: Request, arrival: int) -> tuple[Served, float]:
    """Rank a request by the tokens its user asked for before it: whoever asked least goes first.

    Start-time fair queueing (Goyal, Vin and Cheng 1996), for users who start together. One who
    comes late would start from the count that is being served: the time before isn't a credit."""
    start = served.get(request.tag, 0.0)
    asked = len(request.prompt) + (request.params.max_tokens or 0)
    return {**served, request.tag: start + asked}, start


fair = Policy(name="fair", init=dict, step=fair_step)


def serve(engine: nva.Engine, policy: Policy, requests: Sequence[Request]) -> list[Output]:
    """Answer the requests, and give back what every step brought. This is all an engine does."""
    state, kv, outputs = empty(engine.state.limits, policy), engine.kv, []
    state = submit(state, requests)
    while is_busy(state):
        state, kv, output = step(engine.steps, engine.forward, engine.params, state, kv)
        outputs.append(output)
    engine.kv = kv  # a handle is used up by the forward it is given to; this is the newest
    return outputs


def chart(requests: Sequence[Request], outputs: Sequence[Output]) -> str:
    """A line per request, a column per step: # where the step gave it a token."""
    got = [{found.id for found in output.requests} for output in outputs]
    return "\n".join(
        f"  {r.id:<6}" + "".join(".#"[r.id in ids] for ids in got).rstrip(".") for r in requests
    )


def params_of(user: str) -> nva.SamplingParams:
    """What a user asks of each answer; nva itself never reads the tag."""
    return nva.SamplingParams(temperature=0, max_tokens=12, tag=user)


def main() -> None:
    """Serve the same requests under two policies, two rows at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id; the demo model by default")
    args = parser.parse_args()
    try:
        engine = nva.load(args.model, max_rows=2, max_model_len=256)
    except ValueError as error:
        parser.error(str(error))
    asked = {f"ann/{i}": f"A sentence about the number {i}:" for i in range(6)}
    asked["bob/0"] = "The capital of France is"
    requests = [
        request(name, engine.tokenizer.encode(text), params_of(name.partition("/")[0]))
        for name, text in asked.items()
    ]
    for policy in (first_come_first_served, fair):
        outputs = serve(engine, policy, requests)
        finished = {f.request.id: f.token_ids for output in outputs for f in output.finished}
        print(f"{policy.name}: Bob gets {engine.tokenizer.decode(finished['bob/0'])!r}")
        print(chart(requests, outputs))


if __name__ == "__main__":
    main()
