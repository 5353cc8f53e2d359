"""What is proven of captured rows in a running model: small real modules, with faults put in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.capture.proof import StreamProof, TokenProof, embedding_of
from vllm_compat.capture.rows import Span
from vllm_compat.errors import GuardError

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

WIDTH = 16
LAYERS = 4


class RMSNorm(torch.nn.Module):  # type: ignore[misc]
    """Like vLLM's: with a residual it adds, in place, and returns both."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        if residual is not None:
            residual.add_(x)
            x = residual
        normed = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        return normed if residual is None else (normed, residual)


class Pair(torch.nn.Module):  # type: ignore[misc]
    """Leaves the sum to the next layer's norm, as Llama does."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm()
        self.work = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return self.work(hidden_states), residual


class AddsItself(Pair):
    """The pair looks the same, but its output is in the residual already."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states.clone() if residual is None else residual
        hidden_states = self.work(self.input_layernorm(residual))
        return hidden_states, residual + hidden_states


class KeepsApartNorm(torch.nn.Module):  # type: ignore[misc]
    """A norm of two inputs that adds nothing, as Command-R's."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6), residual


class Parallel(torch.nn.Module):  # type: ignore[misc]
    """Hands on a pair whose first is the stream, and whose norm is given both."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = KeepsApartNorm()
        self.work = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return residual + self.work(hidden_states), residual


class One(torch.nn.Module):  # type: ignore[misc]
    """Hands on one tensor; its first norm is not over the stream (norms behind the blocks)."""

    def __init__(self) -> None:
        super().__init__()
        self.work = torch.nn.Linear(WIDTH, WIDTH)
        self.post_norm = RMSNorm()

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        return hidden_states + self.post_norm(self.work(hidden_states))


class VocabParallelEmbedding(torch.nn.Embedding):  # type: ignore[misc]
    """Has the name of vLLM's."""


class Text(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, layer: type) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(100, WIDTH)
        self.layers = torch.nn.ModuleList(layer() for _ in range(LAYERS))
        self.norm = RMSNorm()


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, layer: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Text(layer)

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden, residual = self.model.embed_tokens(input_ids), None
        for layer in self.model.layers:
            if isinstance(layer, One):
                hidden = layer(positions, hidden)
            else:
                hidden, residual = layer(positions, hidden, residual)
        if isinstance(self.model.layers[0], AddsItself):
            return self.model.norm(residual)
        if isinstance(self.model.layers[0], (Parallel, Casts)):
            return self.model.norm(hidden)
        return self.model.norm(hidden, residual)[0] if residual is not None else self.model.norm(hidden)


def run(
    layer: type, read: Any, ids: tuple[int, ...] = (0, 2, 3)
) -> tuple[StreamProof, dict[int, Any], Any]:
    """Run one step of seven tokens; return the proof, what was captured by ``read``, and the output."""
    model = Model(layer)
    proof = StreamProof(model, "model.layers", model.model.layers, ids, ends=lambda: [2, 6])
    captured: dict[int, Any] = {}
    for layer_id in ids:
        model.model.layers[layer_id].register_forward_hook(
            lambda m, i, out, k=layer_id: captured.__setitem__(k, read(out))
        )
    assert proof.begin(7)
    output = model(torch.arange(7), torch.arange(7))
    proof.end()
    return proof, captured, output


def summed(out: Any) -> Any:
    return out[0] + out[1]


def first(out: Any) -> Any:
    return out[0].clone()


def test_a_pair_whose_sum_the_next_norm_makes_is_proven() -> None:
    proof, captured, output = run(Pair, summed)
    proof.check(proof.sample(captured))
    proof.check_logits(output[[2, 6]])
    assert proof.unproven == ()
    watched = [proof.begin(5) for _ in range(2, 129)]
    assert [n for n, begun in enumerate(watched, start=2) if begun] == [2, 4, 8, 16, 32, 64, 128]
    assert proof.begin(8)
    proof.end()


def test_a_norm_that_is_given_both_and_adds_nothing_is_told_by_what_it_hands_back() -> None:
    proof, captured, output = run(Parallel, first)
    proof.check(proof.sample(captured))
    proof.check_logits(output[[2, 6]] * 0.1)  # scaled on the way to the head
    proof, captured, _ = run(Parallel, summed)
    with pytest.raises(GuardError, match="layer 0, Parallel"):
        proof.check(proof.sample(captured))


class HandsOnMore(Pair):
    """Has no norm in front, and two inputs with a row a token: neither shows what the stream is."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = torch.nn.Identity()

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states if residual is None else residual + hidden_states
        return self.work(residual), residual


def test_a_layer_behind_which_no_stream_shows_is_named_and_not_refused() -> None:
    proof, captured, _ = run(HandsOnMore, summed)
    proof.check(proof.sample(captured))
    assert proof.unproven == (0, 2)


def test_one_tensor_is_proven_by_the_next_layers_input() -> None:
    proof, captured, output = run(One, lambda out: out.clone())
    proof.check(proof.sample(captured))
    proof.check_logits(output[[2, 6]])


@pytest.mark.parametrize(
    ("layer", "read", "layer_id"),
    [(Pair, first, 0), (AddsItself, summed, 0), (One, lambda out: out * 1.1, 0)],
    ids=["the first alone of a pair", "a sum that was made already", "something else"],
)
def test_a_wrong_reading_is_named_with_layer_and_file(layer: type, read: Any, layer_id: int) -> None:
    proof, captured, _ = run(layer, read)
    with pytest.raises(GuardError, match=rf"layer {layer_id}, {layer.__name__} \(.*test_proof.py:\d+\)"):
        proof.check(proof.sample(captured))


def test_the_last_layer_alone_is_proven_by_the_last_norm() -> None:
    proof, captured, _ = run(Pair, summed, ids=(LAYERS - 1,))
    proof.check(proof.sample(captured))
    proof, captured, _ = run(Pair, first, ids=(LAYERS - 1,))
    with pytest.raises(GuardError, match="the last norm goes on with rows that differ"):
        proof.check(proof.sample(captured))


class Casts(Parallel):
    """Norms a copy of another type, as layers do that compute their norms in more digits."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm()

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        normed = self.input_layernorm(hidden_states.double()).float()
        return hidden_states + self.work(normed), hidden_states


def test_the_type_of_the_numbers_counts_only_where_a_layer_has_handed_them_on() -> None:
    proof, captured, _ = run(Casts, first)
    proof.check(proof.sample(captured))
    assert proof.unproven == ()
    proof, captured, _ = run(Pair, lambda out: summed(out).double())
    with pytest.raises(GuardError, match=r"layer 0, Pair .*captured as torch.float64"):
        proof.check(proof.sample(captured))


def test_rows_that_are_not_numbers_prove_nothing() -> None:
    proof, captured, _ = run(Pair, lambda out: (out[0] + out[1]) * float("nan"))
    with pytest.raises(GuardError, match="differ by up to nan"):
        proof.check(proof.sample(captured))


def test_hooks_are_taken_away() -> None:
    proof, _, _ = run(Pair, summed)
    assert not any(module._forward_pre_hooks for module in proof.model.modules())


def test_logits_of_another_forward_are_refused() -> None:
    proof, _, output = run(Pair, summed)
    with pytest.raises(GuardError, match="Model computes logits from rows that its last norm has not"):
        proof.check_logits(output[[6, 2]])


def test_ranks_with_the_same_rows_agree_and_partial_sums_do_not() -> None:
    proof, captured, _ = run(Pair, summed)
    sample = proof.sample(captured)
    assert [rows.shape for rows in sample] == [(7, WIDTH)] * 3
    proof.check_ranks([sample, [rows.clone() for rows in sample]])
    partial = [sample[0], sample[1] * 0.5, sample[2]]
    words = r"layer 2, Pair \(.*ranks 0 and 1 hold different rows \(by up to 50%\)"
    with pytest.raises(GuardError, match=words):
        proof.check_ranks([sample, partial])


def test_a_long_step_is_sampled_and_a_cut_one_refused() -> None:
    proof = run(Pair, summed)[0]
    assert proof.begin(1000)
    assert all(
        len(rows) <= 64 for rows in proof.sample({i: torch.randn(1008, WIDTH) for i in (0, 2, 3)})
    )
    with pytest.raises(GuardError, match=r"layer 2, Pair .*no row for each of the 1000 tokens"):
        proof.sample({0: torch.randn(1000, WIDTH), 2: torch.randn(500, WIDTH)})
    with pytest.raises(GuardError, match="no row for each"):
        proof.sample({0: torch.randn(1000, 4, WIDTH)})  # several streams a token
    proof.end()


# -- tokens


def step(**prompts: list[int]) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=ids) for name, ids in prompts.items()
        ]
    )


def told(order: list[tuple[str, int, int]], ids: list[int], positions: list[int]) -> str | None:
    """Let a model see ids and positions; return what the proof says where the batch is ``order``."""
    model, proof = Model(Pair), TokenProof()
    for handle in proof.watch(model):
        assert handle is not None
    proof.begin(step(a=[5, 6, 7], b=[8, 9]))
    model(torch.tensor(ids), torch.tensor(positions))
    proof.look(tuple(Span(*span) for span in order))
    return proof.judge()


def test_rows_in_the_order_that_the_runner_tells_pass() -> None:
    assert told([("a", 0, 3), ("b", 0, 2)], [5, 6, 7, 8, 9], [0, 1, 2, 0, 1]) is None
    assert told([("b", 0, 2), ("a", 0, 3)], [8, 9, 5, 6, 7, 0, 0], [0, 1, 0, 1, 2, 0, 0]) is None
    assert told([("a", 1, 2)], [6, 7], [1, 2]) is None


@pytest.mark.parametrize(
    ("ids", "positions", "words"),
    [
        ([8, 9, 5, 6, 7], [0, 1, 0, 1, 2], "Request a, token 0: the model was given other ids"),
        ([0, 5, 6, 7, 8, 9], [0, 0, 1, 2, 0, 1], "Request a, token 0: the model was given other ids"),
        ([5, 6, 7, 9, 8], [0, 1, 2, 0, 1], "Request b, token 0: the model was given other ids"),
        ([5, 6, 7, 8, 9], [0, 1, 2, 1, 0], "Request b, token 0: the model was given other positions"),
    ],
    ids=["another order", "padding in front", "swapped tokens", "swapped positions"],
)
def test_rows_in_another_order_are_told(ids: list[int], positions: list[int], words: str) -> None:
    assert (told([("a", 0, 3), ("b", 0, 2)], ids, positions) or "").startswith(words)


def test_positions_of_several_axes_are_read_by_their_first() -> None:
    proof = TokenProof()
    model = Model(Pair)
    proof.watch(model)
    proof.begin(step(a=[5, 6, 7]))
    for hook in model._forward_pre_hooks.values():
        hook(model, (), {"input_ids": None, "positions": torch.tensor([[0, 1, 2]] * 3)})
    proof.look((Span("a", 0, 3),))
    assert proof.judge() is None
    assert proof.told == {"positions"}


def test_a_decode_step_and_an_unknown_request_are_no_fault() -> None:
    proof = TokenProof()
    model = Model(Pair)
    proof.watch(model)
    proof.begin(step(a=[5]))
    model(torch.tensor([5, 77]), torch.tensor([0, 1]))
    proof.look((Span("a", 0, 2),))  # one row more than the prompt has: a token that was sampled
    assert proof.judge() is None


def test_the_embedding_is_the_text_models_one() -> None:
    model = Model(Pair)
    assert embedding_of(model) is model.model.embed_tokens
    model.visual = VocabParallelEmbedding(3, 3)
    assert embedding_of(model) is model.model.embed_tokens
    model.other = VocabParallelEmbedding(3, 3)
    assert embedding_of(model) is None
