"""The kernels for ACL graphs: those of operators.py, and a forward that is captured once per shape.

Read next: graph.py, `compiled_aclgraph`.
"""

from nva.kernels.npu.graph import buckets
from nva.kernels.npu.graph import compiled_aclgraph as compiled
from nva.kernels.npu.operators import (
    add_rms_norm,
    attention,
    attention_inputs,
    block_size,
    cache_memory,
    copy_blocks,
    dtypes,
    gelu_tanh_mul,
    linear,
    make_filter_gaps,
    moe,
    pack_linear,
    pack_norm,
    rms_norm,
    rotary,
    silu_mul,
    vision_attention,
    write_kv,
)

__all__ = [
    "add_rms_norm",
    "attention",
    "attention_inputs",
    "block_size",
    "buckets",
    "cache_memory",
    "compiled",
    "copy_blocks",
    "dtypes",
    "gelu_tanh_mul",
    "linear",
    "make_filter_gaps",
    "moe",
    "pack_linear",
    "pack_norm",
    "rms_norm",
    "rotary",
    "silu_mul",
    "vision_attention",
    "write_kv",
]
