"""Models: from a checkpoint folder to a ModelSpec and its parameters, and the one decoder that runs
them all.

    config.json --hf_config, read_spec, a family--> ModelSpec --params--> a table of parameters
    safetensors --checkpoint, by that table--> Params --decoder, vision--> logits

Importing this package registers the families: llama (and Mistral), qwen2, qwen3, qwen3_vl, gemma3,
minicpm. Read next: spec.py, then decoder.py; docs/add_a_model.md for a family of your own.
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
