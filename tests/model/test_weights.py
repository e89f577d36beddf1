from __future__ import annotations

from dataclasses import replace

import pytest

from emulated_runs import mapped
from overspill.model.weights import ModelMap, Role, Routing
from tiny_models import MakeTiny


def roles(model: ModelMap, layer: int) -> dict[str, Role]:
    return {w.name.relative: w.role for w in model if w.name.layer == layer and w.name.relative is not None}


def test_roles_of_a_mixture_of_experts(tiny: MakeTiny) -> None:
    model = mapped(tiny("qwen3_moe"))
    assert roles(model, 3) == {
        "self_attn.q_proj.weight": Role.ATTENTION,
        "self_attn.k_proj.weight": Role.ATTENTION,
        "self_attn.v_proj.weight": Role.ATTENTION,
        "self_attn.o_proj.weight": Role.ATTENTION,
        "self_attn.q_norm.weight": Role.NORM,
        "self_attn.k_norm.weight": Role.NORM,
        "mlp.experts.gate_up_proj": Role.ROUTED_EXPERT,
        "mlp.experts.down_proj": Role.ROUTED_EXPERT,
        "mlp.gate.weight": Role.ROUTER,
        "input_layernorm.weight": Role.NORM,
        "post_attention_layernorm.weight": Role.NORM,
    }
    outside = {w.full: w.role for w in model if w.name.layer is None}
    assert outside == {
        "model.embed_tokens.weight": Role.EMBEDDING,
        "model.norm.weight": Role.NORM,
        "lm_head.weight": Role.HEAD,
    }


def test_roles_of_shared_experts_and_of_a_dense_first_layer(tiny: MakeTiny) -> None:
    model = mapped(tiny("deepseek_v2"))
    dense, sparse = roles(model, 0), roles(model, 1)
    projections = ("gate_proj", "up_proj", "down_proj")
    assert {n: r for n, r in dense.items() if n.startswith("mlp.")} == {
        f"mlp.{p}.weight": Role.DENSE_MLP for p in projections
    }
    assert {n: r for n, r in sparse.items() if n.startswith("mlp.")} == {
        "mlp.experts.gate_up_proj": Role.ROUTED_EXPERT,
        "mlp.experts.down_proj": Role.ROUTED_EXPERT,
        "mlp.gate.weight": Role.ROUTER,
        **{f"mlp.shared_experts.{p}.weight": Role.SHARED_EXPERT for p in projections},
    }
    assert dense["self_attn.kv_a_proj_with_mqa.weight"] is Role.ATTENTION
    assert dense["self_attn.kv_a_layernorm.weight"] is Role.NORM


def test_roles_where_every_block_is_called_a_mixer(tiny: MakeTiny) -> None:
    model = mapped(tiny("nemotron_h"))
    assert roles(model, 0)["mixer.in_proj.weight"] is Role.ATTENTION
    assert roles(model, 1)["mixer.experts.up_proj"] is Role.ROUTED_EXPERT
    assert roles(model, 1)["mixer.shared_experts.up_proj.weight"] is Role.SHARED_EXPERT
    assert roles(model, 1)["mixer.gate.e_score_correction_bias"] is Role.BUFFER
    assert roles(model, 2)["mixer.q_proj.weight"] is Role.ATTENTION
    assert roles(model, 3)["mixer.up_proj.weight"] is Role.DENSE_MLP


def test_a_step_reads_its_share_of_the_experts(tiny: MakeTiny) -> None:
    model = mapped(tiny("gpt_oss"))
    experts = [w for w in model if w.role is Role.ROUTED_EXPERT]
    assert len(experts) == 6 * 4  # weights and biases
    assert {w.routing for w in experts} == {Routing(experts=6, top_k=2)}
    assert experts[0].step_bytes(1) == pytest.approx(experts[0].nbytes / 3)
    assert experts[0].step_bytes(2) == pytest.approx(experts[0].nbytes * (1 - (2 / 3) ** 2))
    assert experts[0].step_bytes(1000) == pytest.approx(experts[0].nbytes)
    assert all(w.routing is None for w in model if w.role is not Role.ROUTED_EXPERT)


def test_experts_of_layers_that_run_in_rounds_are_read_in_each(tiny: MakeTiny) -> None:
    expert = next(w for w in mapped(tiny("qwen3_moe")) if w.role is Role.ROUTED_EXPERT)
    assert replace(expert, runs=3).step_bytes(2) == pytest.approx(3 * expert.step_bytes(2))


def test_rows_are_no_more_than_the_table(tiny: MakeTiny) -> None:
    table = next(w for w in mapped(tiny("llama")) if w.role is Role.EMBEDDING)
    assert table.step_bytes(3) == 3 * table.nbytes / table.shape[0]
    assert table.step_bytes(10 * table.shape[0]) == table.nbytes
