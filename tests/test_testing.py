"""What nva.testing asks of whoever imports it."""

import subprocess
import sys

import pytest

import nva.testing


def test_laws_folds_and_the_toy_need_no_hypothesis() -> None:
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from nva.testing import LAWS, Arrive, Step, fold, toy_tokens\n"
        "from nva.state.limits import Limits\n"
        "from nva.state.request import SamplingParams, request\n"
        "asked = request(0, [1, 2], SamplingParams(temperature=0, max_tokens=2))\n"
        "run = fold([Arrive((asked,))], Limits(vocab_size=7, max_model_len=8, n_blocks=2))\n"
        "print(run.finished[0].token_ids)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.stdout.strip(), run.stderr) == ("(5, 6)", "")


def test_the_strategies_are_there_when_asked_for() -> None:
    assert nva.testing.limits is nva.testing.strategies.limits
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        _ = nva.testing.unknown
