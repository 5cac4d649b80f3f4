"""After a step that failed: the state before it, made fit to go on.

The law: nothing that the failed step may have overwritten is found again.
Read next: engine.py, which calls this when a step raises.
"""

from __future__ import annotations

from nva.state.columns import evolve
from nva.state.engine import EngineState
from nva.state.plan import Batch, Plan
from nva.state.rows import running
from nva.steps.prefix import forget
from nva.steps.schedule import preempt


def withdraw(state: EngineState, plan: Plan, batch: Batch) -> EngineState:
    """The state before a step that failed, made fit to go on from it, whatever the forward has
    written.

    Blocks that the step took may be overwritten: they are found no more, and the rows that it took
    them from, its preempted ones, stay preempted."""
    for row in running(state.rows).tolist():
        if (int(state.rows.arrival[row]), int(state.rows.sample[row])) in plan.preempted:
            state = preempt(state, row)
    written = {*(batch.slots // state.limits.block_size).tolist(), *batch.copies[:, 1].tolist()}
    return evolve(state, blocks=forget(state.blocks, sorted(written)))
