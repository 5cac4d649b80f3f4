"""A plan as arrays, by hand: images that chunks cut, and rope positions."""

import attrs
import numpy as np
import pytest

from nva.state.engine import empty
from nva.state.limits import Limits
from nva.state.media import Placed, image, media
from nva.state.request import SamplingParams, request
from nva.steps.pack import pack
from nva.steps.schedule import schedule
from nva.steps.submit import submit

SEES = Limits(
    vocab_size=7,
    max_model_len=32,
    n_blocks=8,
    block_size=4,
    max_rows=3,
    max_batched_tokens=3,
    position_axes=3,
)


def test_each_step_gets_the_part_of_an_image_that_it_computes_and_no_empty_one() -> None:
    """Eight tokens, an image of 2 rows and 2 columns at [3, 7), three tokens a step."""
    seen = image(np.zeros((4, 1), np.float32), 2, 2)
    asked = request(
        0,
        [1] * 8,
        SamplingParams(temperature=0, max_tokens=2),
        media=media([Placed(image=seen, start=3)], 8),
    )
    state = submit(empty(SEES), [asked])
    spans, positions = [], []
    for _ in range(3):
        state, plan = schedule(state)
        batch, _ = pack(state, plan)
        assert all(span.image is seen for span in batch.images)
        spans.append([(span.first, span.packed, span.count) for span in batch.images])
        positions.append(batch.positions.tolist())
    assert spans == [[], [(0, 0, 3)], [(3, 0, 1)]]
    assert positions == [
        [[0, 1, 2]] * 3,
        [[3, 3, 3], [3, 3, 4], [3, 4, 3]],
        [[3, 5], [4, 5], [4, 5]],
    ]


def test_a_packed_row_beside_another_has_its_images_where_its_tokens_are() -> None:
    seen = image(np.zeros((2, 1), np.float32), 1, 2)
    params = SamplingParams(temperature=0, max_tokens=2)
    shown = media([Placed(image=seen, start=1)], 4)
    asked = [request(0, [1, 2], params), request(1, [1, 0, 0, 2], params, media=shown)]
    state, plan = schedule(submit(empty(attrs.evolve(SEES, max_batched_tokens=9)), asked))
    (span,) = pack(state, plan)[0].images
    assert (span.first, span.packed, span.count) == (0, 3, 2)


def test_padding_is_one_dummy_row_then_rows_of_no_tokens() -> None:
    """Context is at least 1: attention over nothing would divide by zero."""
    padded = attrs.evolve(
        SEES, position_axes=1, max_batched_tokens=6, token_buckets=(2, 6), row_buckets=(4,)
    )
    params = SamplingParams(temperature=0, max_tokens=2)
    for prompt, contexts, ends in (
        ([1, 2], [2, 1, 1, 1], [2] * 4),
        ([1] * 3, [3, 3, 1, 1], [3, 6, 6, 6]),
    ):
        batch, _ = pack(*schedule(submit(empty(padded), [request(0, prompt, params)])))
        assert batch.context_lens.tolist() == contexts
        assert batch.query_ends.tolist() == ends
        assert (batch.slots[len(prompt) :] < padded.n_scratch * padded.block_size).all()


@pytest.mark.parametrize("name", ["prompt", "stop_token_ids", "stop_ids", "logit_bias"])
def test_token_ids_end_before_the_size_of_the_vocabulary(name) -> None:
    def asked(token):
        fields = {
            "prompt": {"prompt": [0, token]},
            "stop_token_ids": {"params": {"stop_token_ids": [0, token]}},
            "stop_ids": {"stop_ids": [0, token]},
            "logit_bias": {"params": {"logit_bias": {0: 1, token: 1}}},
        }[name]
        params = SamplingParams(**fields.pop("params", {}))
        return request(0, **{"prompt": [0], "params": params, **fields})

    submit(empty(SEES), [asked(6)])
    with pytest.raises(ValueError, match=r"token id 7; the vocabulary is \[0, 7\)"):
        submit(empty(SEES), [asked(7)])
