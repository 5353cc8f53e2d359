"""What a layer hands on is read from whoever reads it, in small sources in the shapes of vLLM's."""

from __future__ import annotations

import pytest
from lab.layer_reading import Handed, Kind, Place, read_layer

ENTRY = """
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
"""
PAIR = ENTRY + "        return self.mlp(hidden_states), residual\n"
FUSED = PAIR.replace(
    "self.input_layernorm(hidden_states, residual)",
    "fused_allreduce_rms_norm(hidden_states, residual, self.input_layernorm)",
)
LOOP = "hidden_states, residual = layer(positions, hidden_states, residual)"
END = "hidden_states, _ = self.norm(hidden_states, residual)"


def read(body: str, loop: str = LOOP, end: str = END, *, extra: str = "", made: str = "MLP()") -> Handed:
    """Read a layer with this body in a model with this loop and this end."""
    source = f"""
from vllm.model_executor.layers.layernorm import RMSNorm
class Layer(Module):
    def __init__(self):
        self.input_layernorm = RMSNorm(8)
        self.post_attention_layernorm = RMSNorm(8)
        self.self_attn = Attention()
        self.mlp = {made}
    def forward(self, positions, hidden_states, residual, more=None):{body}
{extra}
class Model(Module):
    def __init__(self):
        self.layers = make_layers(2, lambda prefix: Layer())
        self.norm = RMSNorm(8)
    def forward(self, input_ids, positions, intermediate_tensors=None):
        hidden_states = self.embed_tokens(input_ids)
        residual = None
        more = None
        for layer in islice(self.layers, 0, 2):
            {loop}
        if not get_pp_group().is_last_rank:
            return IntermediateTensors(dict(a=hidden_states))
        {end}
        return hidden_states
"""
    modules = {
        "vllm.models.tiny": source,
        "vllm.model_executor.layers.layernorm": "class RMSNorm(CustomOp):\n    pass\n",
    }
    return read_layer(
        Place("vllm.models.tiny", "Layer"), Place("vllm.models.tiny", "Model"), "layers", modules.get
    )


def said(handed: Handed) -> list[tuple[Kind, str]]:
    return [(case.kind, case.stream) for case in handed.cases]


def test_a_pair_that_the_next_norm_adds_is_a_sum() -> None:
    handed = read(PAIR)
    assert said(handed) == [(Kind.SUM, "1st + 2nd")]
    assert handed.keeps
    assert handed.cases[0].next_norm
    assert handed.cases[0].final_norm


def test_one_tensor_is_the_stream() -> None:
    body = """
        x = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        return x + self.mlp(self.post_attention_layernorm(x))
"""
    loop, end = (
        "hidden_states = layer(positions, hidden_states, None)",
        "hidden_states = self.norm(hidden_states)",
    )
    assert said(read(body, loop, end)) == [(Kind.STREAM, "the output")]


def test_a_residual_that_nobody_reads_is_no_part_of_the_stream() -> None:
    body = """
        residual = hidden_states
        x = self.input_layernorm(hidden_states)
        return residual + self.self_attn(x) + self.mlp(x), residual
"""
    assert said(read(body, end="hidden_states = self.norm(hidden_states)")) == [(Kind.FIRST, "1st")]


def test_a_layer_that_adds_to_the_residual_itself_hands_on_the_second() -> None:
    body = """
        residual = residual if residual is not None else hidden_states
        x = self.self_attn(self.input_layernorm(residual))
        residual = residual + x
        x = self.mlp(self.post_attention_layernorm(residual))
        return x, residual + x
"""
    assert said(read(body, end="hidden_states = self.norm(residual)")) == [(Kind.OTHER, "2nd")]


def test_a_reduction_that_the_next_norm_makes_is_a_partial_sum() -> None:
    end = "hidden_states, _ = fused_allreduce_rms_norm(hidden_states, residual, self.norm)"
    assert said(read(FUSED, end=end)) == [(Kind.PARTIAL, "reduce(1st) + 2nd")]


def test_a_reduction_at_one_of_the_two_places_is_enough_to_be_partial() -> None:
    assert said(read(FUSED)) == [(Kind.PARTIAL, "reduce(1st) + 2nd")]


def test_a_deferred_reduction_is_told_with_its_condition() -> None:
    body = """
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        elif self.defer:
            norm = self.input_layernorm
            hidden_states, residual = fused_allreduce_rms_norm(hidden_states, residual, norm)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual
"""
    end = """if self.defer:
            hidden_states = tensor_model_parallel_all_reduce(hidden_states)
        hidden_states, _ = self.norm(hidden_states, residual)"""
    cases = {case.when: case.kind for case in read(body, end=end).cases}
    assert cases == {("self.defer",): Kind.PARTIAL, ("not (self.defer)",): Kind.SUM}


def test_a_reduction_left_out_that_nobody_makes_is_not_proven() -> None:
    handed = read(PAIR, made="MLP(reduce_results=False)")
    assert handed.kind == Kind.UNKNOWN
    assert "reduce_results=False" in handed.cases[0].reason


def test_a_third_element_is_found() -> None:
    body = ENTRY + "        return self.mlp(hidden_states), more, residual\n"
    loop = "hidden_states, more, residual = layer(positions, hidden_states, residual, more)"
    assert said(read(body, loop)) == [(Kind.OTHER, "1st + 3rd")]
    assert read(body, loop).cases[0].returned == ("tensor", "None", "tensor")


def test_two_norms_that_disagree_prove_nothing() -> None:
    handed = read(PAIR, end="hidden_states = self.norm(hidden_states)")
    assert handed.kind == Kind.UNKNOWN
    assert "reads 1st + 2nd, the final norm 1st" in handed.cases[0].reason


def test_a_named_tuple_is_not_guessed() -> None:
    body = ENTRY + "        return Out(self.mlp(hidden_states), residual)\n"
    loop = "out = layer(positions, hidden_states, residual); hidden_states, residual = out.a, out.b"
    assert read(body, loop).kind == Kind.UNKNOWN


def test_a_scaled_sum_is_not_taken_for_the_sum() -> None:
    body = """
        if residual is None:
            residual = hidden_states
        else:
            residual = residual + hidden_states * self.scale
        return self.mlp(self.input_layernorm(residual)), residual
"""
    assert read(body).kind == Kind.UNKNOWN


def test_several_streams_are_named() -> None:
    body = PAIR.replace("self.mlp(hidden_states)", "self.mlp(self.hc_post(hidden_states))")
    assert read(body).kind == Kind.SEVERAL


def test_a_forward_that_the_model_never_calls_is_said() -> None:
    extra = """
    def step(self, hidden_states, residual):
        return self.mlp(hidden_states), residual
"""
    handed = read(PAIR, "hidden_states, residual = layer.step(hidden_states, residual)", extra=extra)
    assert not handed.called
    assert "no hook fires" in handed.cases[0].reason


@pytest.mark.parametrize("call", ["self._inner(positions, hidden_states, residual)"])
def test_a_method_that_forward_hands_on_to_is_followed(call: str) -> None:
    extra = f"    def _inner(self, positions, hidden_states, residual):{PAIR}"
    assert said(read(f"\n        return {call}\n", extra=extra)) == [(Kind.SUM, "1st + 2nd")]
