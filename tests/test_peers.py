"""Peers are asked what nva is asked: through the protocol, in workloads of the same lengths, with
the same weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from bench import workloads
from bench.peers import models
from bench.peers.protocol import running
from bench.peers.ratio import compare, n_tokens, seconds
from nva import bench
from tests.checkpoints import FAMILIES, SIZES

FAKE = (sys.executable, "tests.fake_peer")


def test_a_peer_is_asked_in_a_python_of_its_own_and_may_print_what_it_likes() -> None:
    with running(*FAKE, "model", "bfloat16") as serve:
        assert serve(bench.Workload(prompts=[[7, 8], [9]], output_lens=[3, 4])) == (7.0, 2.0)
        assert serve(bench.Workload(prompts=[[5, 8]], output_lens=[3])) == (5.0, 1.0)


def test_an_answer_with_tokens_missing_is_no_answer() -> None:
    with (
        running(*FAKE, "model", "bfloat16") as serve,
        pytest.raises(RuntimeError, match="2 tokens where 3 were"),
    ):
        serve(bench.Workload(prompts=[[7]], output_lens=[3]))


def test_a_peer_that_cannot_start_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(RuntimeError, match="ended without an answer"),
        running(*FAKE, "missing", "bfloat16"),
    ):
        pass
    assert "no such model" in capfd.readouterr().err


def test_rounds_have_the_same_lengths_and_sharing_but_no_prompt_in_common() -> None:
    for workload in workloads.workloads(None).values():
        rounds = [workloads.shifted(workload, n) for n in range(3)]
        assert rounds[0] == workload
        assert len({tuple(tuple(map(len, each.prompts)) for each in rounds)}) == 1
        assert not {tuple(ids[:16]) for ids in rounds[1].prompts} & {
            tuple(ids[:16]) for ids in rounds[2].prompts
        }
        assert all(
            100 <= token < 40_000 for each in rounds for ids in each.prompts for token in ids
        )
    shared = rounds[2].prompts  # of W4, the last
    assert len({tuple(ids[:1024]) for ids in shared}) == 1 < len({tuple(ids) for ids in shared})


def test_a_warm_up_is_the_same_prompts_with_short_answers() -> None:
    workload = bench.Workload(prompts=[[1], [2]], output_lens=[3, 30])
    assert workloads.shortened(workload, 8) == bench.Workload(
        prompts=[[1], [2]], output_lens=[3, 8]
    )


def test_a_comparison_counts_the_tokens_and_the_time_that_a_workload_is_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
    }
    shape = (
        bench.SHAPES["qwen3-0.6b-shape"]
        | small
        | {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 40_000}
    )
    monkeypatch.setitem(bench.SHAPES, "small-shape", shape)
    monkeypatch.setattr("bench.peers.ratio.bandwidth", lambda: 1e9)
    engine = bench.open_model("small-shape", "float32", max_rows=2, max_model_len=64, n_blocks=64)
    workload, asked = bench.random_workload(0, 1, (20, 20), (11, 11)), list[bench.Workload]()
    row = compare("W2", workload, engine, lambda each: (asked.append(each) or 0.5, 1.5), 2)
    assert (row["peer s"], row["peer tokens/s"], row["bandwidth GB/s"]) == (1.0, 10.0, 1.0)
    assert row["ratio"] == 1.0 / row["nva s"]
    assert [each.output_lens for each in asked] == [[8], [11], [11]]
    assert n_tokens("W3", workload) == 20
    assert n_tokens("W1", workload) == 11
    assert seconds("W1", (0.5, 1.5)) == 1.5


@pytest.mark.parametrize(
    ("family", "head_dim"), [("llama", 8), ("qwen3", 128)]
)  # the only size the reader knows
def test_a_gguf_file_holds_the_weights_of_the_checkpoint(
    family: str, head_dim: int, tmp_path: Path
) -> None:
    config, model = FAMILIES[family]
    torch.manual_seed(0)
    original = model(
        config(**SIZES | {"vocab_size": 300, "head_dim": head_dim, "tie_word_embeddings": True})
    )
    original.save_pretrained(tmp_path)
    models.write_gguf(tmp_path, tmp_path / "model.gguf", "bf16")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="model.gguf",
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    for name, weight in original.state_dict().items():
        rounded = weight if weight.ndim == 1 else weight.bfloat16().float()
        assert torch.equal(read.state_dict()[name], rounded), name


def test_a_model_that_no_gguf_file_can_be_written_for_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    with pytest.raises(ValueError, match="is a gemma3_text.*--peer-model"):
        models.write_gguf(tmp_path, tmp_path / "model.gguf", "bf16")
