"""Shares of ceilings mislead as soon as the work behind them is miscounted."""

from types import SimpleNamespace

import pytest

from ignis.gguf import open_gguf
from ignis.graph.models import ModelConfig, build_graph
from ignis.graph.passes import run_pipeline
from ignis.runtime.work import StepSize, Work, step_work
from tests.random_models import RandomModel

MODEL = RandomModel(formats=("q8_0",), n_layers=3, n_embd=64, n_heads=4, n_kv_heads=2,
                    head_dim=32, n_ff=96, tied=False)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """The naive and the optimised graph, and the file's tensors."""
    def of(model):
        path = model.write(tmp_path_factory.mktemp("work") / "m.gguf")
        with open_gguf(path) as file:
            naive = build_graph(ModelConfig.from_gguf(file), file.tensors)
            return naive, run_pipeline(naive)[0], dict(file.tensors)
    return of


def test_weight_bytes_of_a_decode_step_are_the_matrices_of_the_file(graphs):
    naive, _, tensors = graphs(MODEL)
    matrices = [t for name, t in tensors.items()
                if len(t.shape) == 2 and name != "token_embd.weight"]
    assert step_work(naive, StepSize(1)).weight_nbytes == sum(t.nbytes for t in matrices)
    assert len(matrices) == 3 * 7 + 1


def test_multiply_adds_are_those_of_the_formula(graphs):
    naive, _, _ = graphs(MODEL)
    layer = 64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 96
    n_tokens, n_past, n_vocab = 5, 7, naive.outputs[0].type.shape[1]
    work = step_work(naive, StepSize(n_tokens, n_past, n_logits=2))
    assert work.int8_macs == 3 * n_tokens * layer + 2 * 64 * n_vocab
    seen = sum(n_past + t + 1 for t in range(n_tokens))
    assert work.f32_macs == 3 * 2 * seen * 4 * 32
    assert work.kv_nbytes == 3 * 2 * (n_past + n_tokens) * 2 * 32 * 2


def test_a_window_bounds_what_is_seen(graphs):
    """A long context costs a layer with a window no more than the window."""
    windowed = RandomModel(n_layers=1, keys={"attention.sliding_window": 20})
    naive, optimised, _ = graphs(windowed)
    work = step_work(naive, StepSize(5, 17))
    assert work.f32_macs == 2 * (18 + 19 + 20 + 20 + 20) * 4 * 32
    assert work.kv_nbytes == 2 * 22 * 2 * 32 * 2
    assert step_work(optimised, StepSize(1, 900)).kv_nbytes == 2 * 20 * 2 * 32 * 2


def test_passes_do_not_change_the_work(graphs):
    for formats in (("q8_0",), ("f16",), ("q4_1", "bf16", "q4_0")):
        naive, optimised, _ = graphs(RandomModel(formats=formats, architecture="qwen2"))
        size = StepSize(33, 100)
        assert step_work(naive, size) == step_work(optimised, size)


def test_float_weights_are_f32_multiply_adds(graphs):
    naive, _, _ = graphs(RandomModel(formats=("bf16",)))
    work = step_work(naive, StepSize(4))
    assert work.int8_macs == 0 and work.f32_macs > 0


def test_a_step_without_logits_does_not_read_the_output_matrix(graphs):
    naive, _, tensors = graphs(MODEL)
    less = step_work(naive, StepSize(8, n_logits=0))
    more = step_work(naive, StepSize(8, n_logits=1))
    assert more.weight_nbytes - less.weight_nbytes == tensors["output.weight"].nbytes


def test_least_times_add_up_kinds_of_arithmetic():
    ceilings = SimpleNamespace(bandwidth_gb_s=2.0, int8_gmac_s=4.0, f32_gmac_s=1.0)
    work = Work(int8_macs=4_000_000_000, f32_macs=500_000_000, weight_nbytes=10**9,
                kv_nbytes=10**9)
    assert work.arithmetic_seconds(ceilings) == pytest.approx(1.5)
    assert work.bandwidth_seconds(ceilings) == pytest.approx(1.0)


def test_a_token_reads_the_experts_that_it_uses(graphs):
    """Two of seven for one token, all of them for many; the shared one always."""
    moe = RandomModel(architecture="qwen2moe", n_experts=7, n_layers=1, tied=False)
    naive, optimised, tensors = graphs(moe)
    matrices = [t for name, t in tensors.items()
                if len(t.shape) > 1 and name != "token_embd.weight"]
    experts = sum(t.nbytes for t in matrices if len(t.shape) == 3)
    # The shared expert's gate is a vector in the file, and read as one.
    others = sum(t.nbytes for t in matrices if len(t.shape) == 2)
    for graph in (naive, optimised):
        assert step_work(graph, StepSize(1)).weight_nbytes == others + experts * 2 // 7
        assert step_work(graph, StepSize(4)).weight_nbytes == others + experts
    more = step_work(naive, StepSize(5)).int8_macs - step_work(naive, StepSize(4)).int8_macs
    assert more == 64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * (96 + 2 * 64)
