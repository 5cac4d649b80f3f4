"""What an Ascend installation can run: which graph modes, for which attention, and why not the
others.

The law: a mode is chosen with a reason that can be told, and refused with a reason that can be
acted on. The limits are those of the attention operator's tiling by CANN version: docs/npu.md has
the table with its sources. This file runs without torch_npu. Read next: __init__.py, which acts on
the choice; nva/cli/doctor.py, which prints it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs

from nva.kernels import GRAPHS

MODES = GRAPHS[1:]
PREFERRED = MODES[::-1]
"""What `auto` tries, in this order: an ACL graph asks least of CANN and compiles in seconds; the
graph engine compiles in minutes."""

Version = tuple[int, int]
FIRST_PAGED, FIRST_FUSED, FIRST_GENERAL = (8, 3), (8, 5), (9, 0)


class Tower(Protocol):
    """What decides it for a vision tower; a VisionSpec has it."""

    hidden_size: int
    n_heads: int


class Heads(Protocol):
    """What decides which attention kernel a model gets; a ModelSpec has it."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    vision: Tower | None


@attrs.frozen(kw_only=True)
class Installation:
    """What was found. None is a version that could not be read, which is taken for new enough."""

    cann: Version | None = None
    has_attention: bool = True  # torch.ops.npu.npu_fused_infer_attention_score_v2
    has_torchair: bool = True
    has_npugraph_ex: bool = True


@attrs.frozen(kw_only=True)
class Route:
    """The kernel that serves layout TND over a paged cache, and whether it takes lengths as
    tensors."""

    kernel: str
    takes_tensors: bool


def parse_version(text: str | None) -> Version | None:
    """(8, 5) of "8.5.0", "8.5.RC1.alpha001" or "CANN-8.5"; None where there is none."""
    found = re.search(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


def attention_route(cann: Version | None, heads: Heads) -> Route | str:
    """The route of a model's attention, or why there is none."""
    windowed = any(window is not None for window in heads.windows)
    version = cann or FIRST_GENERAL
    if version < FIRST_PAGED:
        return (
            f"CANN {_text(cann)} has no paged attention for packed tokens; install CANN 8.3 or "
            "later"
        )
    if heads.n_heads > 64 * heads.n_kv_heads:
        return (
            f"{heads.n_heads} query heads share {heads.n_kv_heads}; the attention kernel allows 64 "
            "to one"
        )
    grouped = heads.n_heads != heads.n_kv_heads
    if version >= FIRST_GENERAL or (version >= FIRST_FUSED and grouped and not windowed):
        if heads.head_dim % 16 or heads.head_dim > 256:
            return (
                f"head_dim {heads.head_dim} is not a multiple of 16 up to 256, as the attention "
                "kernel wants"
            )
        return Route(kernel="fused (FAI)", takes_tensors=True)
    head_dims = (64, 128) if version < FIRST_FUSED else (64, 128, 192)
    if heads.head_dim not in head_dims:
        return (
            f"head_dim {heads.head_dim} is none of {head_dims}, all that CANN {_text(cann)} serves "
            "for this model"
        )
    return Route(kernel="prompt (PFA)", takes_tensors=False)


def filled_head_dim(head_dim: int) -> int:
    """The size that the heads of a vision tower are filled up to: the two that every CANN takes
    without a cache."""
    return 64 if head_dim <= 64 else 128


def tower_refusal(tower: Tower | None) -> str | None:
    """Why a vision tower's attention won't work, or None."""
    head_dim = tower.hidden_size // tower.n_heads if tower else 0
    if head_dim > 128:
        return (
            f"the vision tower's heads of {head_dim} are wider than 128, the most that its "
            "attention kernel takes"
        )
    return None


def refusals(found: Installation, heads: Heads) -> dict[str, str | None]:
    """For each mode, why it won't work here, or None."""
    route = attention_route(found.cann, heads)
    common = route if isinstance(route, str) else tower_refusal(heads.vision)
    if not found.has_attention:
        common = (
            "torch_npu has no npu_fused_infer_attention_score_v2; install torch_npu 2.7.1 or later"
        )
    takes_tensors = isinstance(route, Route) and route.takes_tensors
    return {
        "eager": common,
        "ge": common
        or (None if found.has_torchair else "torchair is missing from this torch_npu")
        or (
            None
            if takes_tensors
            else f"with CANN {_text(found.cann)} this model's attention takes no tensor lengths"
        ),
        "aclgraph": common
        or (None if found.has_npugraph_ex else "this torch_npu has no npugraph_ex"),
    }


def choose_mode(wanted: str, found: Installation, heads: Heads) -> tuple[str, str]:
    """The graph mode to run and the reason. Raises ValueError for a mode that is unknown or won't
    work here."""
    if wanted not in (*MODES, "auto"):
        raise ValueError(f"graph is {wanted!r}; choose one of auto, {', '.join(MODES)}")
    why_not = refusals(found, heads)
    if wanted != "auto":
        if why_not[wanted] is not None:
            raise ValueError(
                f"graph={wanted!r} won't work here: {why_not[wanted]}; graph='auto' takes what does"
            )
        return wanted, "asked for"
    chosen = next((mode for mode in PREFERRED if why_not[mode] is None), None)
    if chosen is None:
        raise ValueError(f"the NPU can't run this model: {why_not['eager']}")
    return chosen, _reason(chosen, why_not)


def _reason(chosen: str, why_not: Mapping[str, str | None]) -> str:
    passed_over: Sequence[str] = [
        f"{mode}: {why_not[mode]}" for mode in PREFERRED[: PREFERRED.index(chosen)]
    ]
    return "; ".join(passed_over) or "the installation supports it"


def _text(version: Version | None) -> str:
    return "of unknown version" if version is None else ".".join(map(str, version))
