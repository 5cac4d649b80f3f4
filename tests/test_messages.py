"""What nva tells its user: once, in one line, where the application wants it."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest


def said(setup: str, text: str = "say('decided'); say('costly', logging.WARNING)") -> list[str]:
    """What a fresh process writes to stderr, stdout staying empty."""
    code = f"import logging, sys\nfrom nva.host.messages import say\n{setup}\n{text}"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (0, ""), child.stderr
    return child.stderr.splitlines()


BOTH = ["nva: decided", "nva: costly"]
CASES = {
    "nothing is configured": ("", BOTH),
    "nva is silenced": ("logging.getLogger('nva').setLevel(logging.WARNING)", BOTH[1:]),
    "nva is silenced more": ("logging.getLogger('nva').setLevel(logging.ERROR)", []),
    "everything is disabled": ("logging.disable()", []),
    "information is disabled": ("logging.disable(logging.INFO)", BOTH[1:]),
    "the root has a handler": ("logging.basicConfig()", ["WARNING:nva:costly"]),
    "the root wants all": (
        "logging.basicConfig(level='INFO')",
        ["INFO:nva:decided", "WARNING:nva:costly"],
    ),
    "the root has a form": (
        "logging.basicConfig(level='DEBUG', format='%(name)s %(message)s')",
        ["nva decided", "nva costly"],
    ),
    "nva has a handler": (
        "nva = logging.getLogger('nva'); nva.addHandler(logging.StreamHandler()); nva.setLevel('INFO')",
        ["decided", "costly"],
    ),
    "nva hands nothing up": (
        "logging.basicConfig(level='INFO'); logging.getLogger('nva').propagate = False",
        BOTH,
    ),
    "somebody else has a handler": (
        "logging.getLogger('other').addHandler(logging.StreamHandler())",
        BOTH,
    ),
    "stderr is replaced": ("sys.stderr = sys.__stderr__", BOTH),
    "the root is configured later": (
        "say('before'); logging.basicConfig(level='INFO')",
        ["nva: before", "INFO:nva:decided", "WARNING:nva:costly"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_message_goes_once_where_the_application_wants_it(case: str) -> None:
    setup, expected = CASES[case]
    assert said(setup) == expected


def test_an_application_can_collect_messages(caplog: pytest.LogCaptureFixture) -> None:
    from nva.host.messages import say

    with caplog.at_level(logging.INFO, "nva"):
        say("100% of %s are text")
    assert caplog.messages == ["100% of %s are text"]
    assert caplog.records[0].name == "nva"


def test_messages_need_nothing_else() -> None:
    assert said(
        "", "print([m for m in ('torch', 'numpy') if m in sys.modules], file=sys.stderr)"
    ) == ["[]"]
