"""Models: from a checkpoint folder to a ModelSpec and its parameters, and the one decoder that runs
them.

Importing this package registers the families. Read next: spec.py, then decoder.py.
"""

from nva.models import gemma3, llama, minicpm, qwen2, qwen3, qwen3_vl
from nva.models.checkpoint import Checkpoint, load_checkpoint, load_params, open_checkpoint
from nva.models.decoder import decode
from nva.models.params import Params, Weights, random_params
from nva.models.registry import FAMILIES, register
from nva.models.rope import RopeSpec
from nva.models.spec import ModelSpec

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "ModelSpec",
    "Params",
    "RopeSpec",
    "Weights",
    "decode",
    "gemma3",
    "llama",
    "load_checkpoint",
    "load_params",
    "minicpm",
    "open_checkpoint",
    "qwen2",
    "qwen3",
    "qwen3_vl",
    "random_params",
    "register",
]
