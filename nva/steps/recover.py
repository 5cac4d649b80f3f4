"""The ways back: from a step that failed, and to a cache that others have written to.

The law: nothing that may have been overwritten is found again.
Read next: engine.py, which calls withdraw() when a step raises.
"""

from __future__ import annotations

import numpy as np

from nva.state.columns import Int, evolve
from nva.state.engine import EngineState
from nva.state.generation import COLD, digest
from nva.state.plan import Batch, Plan
from nva.state.rows import running, sample_id
from nva.steps.prefix import forget
from nva.steps.schedule import preempt


def withdraw(state: EngineState, plan: Plan, batch: Batch) -> EngineState:
    """The state before a step that failed, made fit to go on from it, whatever the forward has
    written. It belongs to the cache as it is now: `kv.renew(state.generation)`.

    Blocks that the step took may be overwritten: they are found no more, and the rows that it took
    them from, its preempted ones, stay preempted. Other states from before the step don't know of
    that, so the generation is another."""
    for row in running(state.rows).tolist():
        if sample_id(state.rows, row) in plan.preempted:
            state = preempt(state, row)
    written = written_blocks(batch, state.limits.block_size)
    blocks = forget(state.blocks, written.tolist())
    generation = digest(state.generation, state.history, written.tobytes())
    return evolve(state, blocks=blocks, generation=generation)


def written_blocks(batch: Batch, block_size: int) -> Int:
    """The blocks that a forward writes to, ascending."""
    return np.unique(np.concatenate([batch.slots // block_size, batch.copies[:, 1]]))


def cold(state: EngineState) -> EngineState:
    """The state made fit for any cache: every row waits again with the tokens it has, and no block
    is found by what it holds. What is lost is computation, nothing else."""
    for row in reversed(running(state.rows).tolist()):
        state = preempt(state, row)
    blocks = forget(state.blocks, sorted(state.blocks.keys.as_dict()))
    return evolve(state, blocks=blocks, generation=COLD)
