"""What a model's graphs are made of, worked out from its spec: kinds of operators, and how often
each occurs.

Read next: test_graphs.py, which compares the graphs that the compilers make.
"""

from __future__ import annotations

GE_KINDS = {
    "Add", "Cast", "ConcatV2", "Const", "Data", "FusedInferAttentionScore", "GatherV2", "GeGluV2", "MatMul",
    "MatMulV2", "Mul", "AddRmsNorm", "NetOutput", "Reshape", "RmsNorm", "RotaryMul", "ScatterPaKvCache", "SplitV",
    "Squeeze", "SwiGlu", "Unsqueeze",
}  # fmt: skip
"""All that a dense model's graph is made of; no TensorMove, Identity or BroadcastTo, which would be
copies."""
EXPERT_KINDS = {
    "ClipByValueV2", "Fill", "GroupedMatmul", "MoeFinalizeRoutingV2", "MoeGatingTopKSoftmax", "MoeInitRoutingV3",
    "RealDiv", "ReduceSum", "Sigmoid",
}  # fmt: skip
"""What experts add: their four operators, no fifth for the gate; places of padding put in range;
weights that sum to 1; the gate of what is shared; and the biases and scales that a grouped product
doesn't have, of size 0."""


SEEING_KINDS = {"ReduceSum", "SelectV2"}
"""What images add: one of three positions for each pair of the rope; features in the place of
embeddings. Their other levels are added as they come, by Add: none is cut out of another, which
would be a copy."""


def ge_counts(spec):
    """How often each of the NPU's operators occurs in a graph of this model."""
    n, n_ropes, n_gates = spec.n_layers, len(set(spec.ropes)), n_gated(spec)
    experts = [each for each in spec.experts if each]
    return {
        "FusedInferAttentionScore": n,
        "ScatterPaKvCache": n,  # keys and values by one operator
        "RotaryMul": 2 * n,
        "AddRmsNorm": 2 * n,
        "RmsNorm": n_norms(spec),
        "SwiGlu": n_gates * (spec.activation == "silu"),
        "GeGluV2": n_gates * (spec.activation == "gelu_tanh"),
        # Embedding, cos and sin; what wants logits: of what attention gives, of the stream, of what
        # is padding.
        "GatherV2": 3 + 2 * n_ropes + bool(spec.experts[-1]),
        "MatMul": n_products(spec),
        "MoeGatingTopKSoftmax": len(experts),
        "MoeInitRoutingV3": len(experts),
        "GroupedMatmul": 2 * len(experts),
        "MoeFinalizeRoutingV2": len(experts),
        "ReduceSum": sum(each.normalize for each in experts) + 2 * n_ropes * bool(spec.rope_axes),
        "Sigmoid": n_shared(spec),
        "SelectV2": bool(spec.vision),
        **({"Add": n_levels(spec) - 1} if spec.vision else {}),
    }


def n_levels(spec):
    """Inputs that hold features of images, for the embedding and for the layers that DeepStack adds
    to."""
    return 1 + len(spec.vision.deepstack_layers) if spec.vision else 0


def n_step_inputs(spec):
    """Inputs of a step on a device: token ids, positions, slots, logit index, block tables; with
    experts, what is padding; with images, their features and where they are."""
    return 5 + any(spec.experts) + n_levels(spec) + bool(spec.vision)


def n_shared(spec):
    """Layers with a part that computes all tokens beside the experts."""
    return sum(bool(each and each.shared_size) for each in spec.experts)


def n_gated(spec):
    """Gates: one for each MLP or all experts, one for what they share."""
    return spec.n_layers + n_shared(spec)


def n_norms(spec):
    """Norms that nothing is added before."""
    return 1 + spec.n_layers * (2 * spec.qk_norm + 2 * spec.out_norms)


def n_products(spec):
    """Matrix products but those of the experts: q, k, v; output; an MLP's two, or the router and
    three of what experts share; and the head."""
    n_mlps = sum(each is None for each in spec.experts)
    return 2 * spec.n_layers + 2 * n_mlps + (spec.n_layers - n_mlps) + 3 * n_shared(spec) + 1


def ge_kinds(spec):
    """All kinds of operators that a graph may have. A scale of embeddings is a number, filled
    in."""
    scales = {"Fill", "Muls"} if spec.embed_scale != 1 else set()
    return (
        GE_KINDS
        | scales
        | (EXPERT_KINDS if any(spec.experts) else set())
        | (SEEING_KINDS if spec.vision else set())
    )


def as_counted(caught):
    """The counts with one name for matrix products; those with a bias are MatMulV2."""
    counts = dict(caught.counts)
    return {**counts, "MatMul": counts.get("MatMul", 0) + counts.get("MatMulV2", 0)}


def aclgraph_counts(spec):
    n, n_routed = spec.n_layers, sum(each is not None for each in spec.experts)
    return {
        "npu.npu_fused_infer_attention_score_v2.out": n,
        "npu.npu_scatter_nd_update_.default": 2 * n,
        "npu.npu_rotary_mul.default": 2 * n,
        "npu.npu_add_rms_norm.default": 2 * n,
        "npu.npu_rms_norm.default": n_norms(spec),
        "npu.npu_swiglu.default": n_gated(spec) * (spec.activation == "silu"),
        "npu.npu_geglu.default": n_gated(spec) * (spec.activation == "gelu_tanh"),
        "npu.npu_moe_gating_top_k_softmax.default": n_routed,
        "npu.npu_moe_init_routing_v2.default": n_routed,
        "npu.npu_grouped_matmul.default": 2 * n_routed,
        "npu.npu_moe_finalize_routing.default": n_routed,
        "aten.where.self": bool(spec.vision),
        "aten.select.int": 0,  # of one level of features: each is an input of its own
        "aten.copy_.default": 0,  # of a whole cache, if the write had not been put back in place
        "aten.clone.default": 0,
    }
