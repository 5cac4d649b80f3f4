"""docs/add_a_model.md does what it says: its family is registered, its proof holds, and a wrong
family fails it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from nva.models.registry import FAMILIES, VERIFIED
from tests.checkpoints import SIZES, randomize

PAGE = Path(__file__).parents[1] / "docs" / "add_a_model.md"
FAMILY, PROOF = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random Granite, and a folder to import granite.py from; what it registers is forgotten
    afterwards."""
    for known in (FAMILIES, VERIFIED):
        monkeypatch.setitem(known, "GraniteForCausalLM", ())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "granite", raising=False)
    scales = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7}
    model = GraniteForCausalLM(
        GraniteConfig(**SIZES, **scales, logits_scaling=4.0, tie_word_embeddings=False)
    )
    randomize(model, seed=1)
    model.save_pretrained(tmp_path / "model")
    return tmp_path


def test_the_family_takes_under_forty_lines() -> None:
    assert len(FAMILY.splitlines()) < 40


def test_the_page_adds_a_model_and_proves_it(folder: Path) -> None:
    (folder / "granite.py").write_text(FAMILY)
    exec(PROOF, {"folder": folder / "model"})


@pytest.mark.parametrize("scale", ["embed_scale", "attn_scale", "residual_scale", "logit_scale"])
def test_the_proof_fails_without_one_of_the_scales(folder: Path, scale: str) -> None:
    """A scale that the family reads and then forgets; one that it doesn't even read is refused
    before the proof."""
    forgotten = re.sub(rf"(\n *){scale}=(.*),", r"\1**dict.fromkeys([], \2),", FAMILY)
    assert forgotten != FAMILY
    (folder / "granite.py").write_text(forgotten)
    with pytest.raises(AssertionError, match=r"tensor\("):
        exec(PROOF, {"folder": folder / "model"})
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("setting", ["embedding_multiplier", "logits_scaling"])
def test_a_setting_that_the_family_does_not_read_is_refused(folder: Path, setting: str) -> None:
    (folder / "granite.py").write_text(re.sub(rf"\n.*{setting}.*", "", FAMILY))
    with pytest.raises(
        ValueError,
        match=f"config.json sets {setting} to .*, which nva doesn't implement for Granite",
    ):
        exec(PROOF, {"folder": folder / "model"})
