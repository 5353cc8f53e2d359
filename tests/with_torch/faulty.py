"""A tiny decoder as vLLM builds them, under a FAKE model runner, and layers with faults in them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

WIDTH = 16
LAYERS = 4
PROMPTS = {"r1": [11, 12, 13, 14, 15], "r2": [21, 22], "r3": [31, 32, 33, 34]}


class RMSNorm(torch.nn.Module):  # type: ignore[misc]
    """Like vLLM's: with a residual it adds, in place, and returns both."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        if residual is not None:
            residual.add_(x)
            x = residual
        normed = x / x.pow(2).mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-6)
        return normed if residual is None else (normed, residual)


class DecoderLayer(torch.nn.Module):  # type: ignore[misc]
    """Leaves the last sum to the next layer's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm()
        self.self_attn = torch.nn.Linear(WIDTH, WIDTH)
        self.post_attention_layernorm = RMSNorm()
        self.mlp = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states) + positions[:, None] * 0.01
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class AddsItself(DecoderLayer):
    """Hands on the same pair and reads it first as ever, but the sum is in the residual already."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = residual + 0 if residual is not None else hidden_states
        residual = residual + self.self_attn(self.input_layernorm(residual))
        hidden_states = self.mlp(self.post_attention_layernorm(residual))
        return hidden_states, residual + hidden_states


class ThirdElement(DecoderLayer):
    """Hands on its residual as the third, as Kimi-Linear does."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
        else:
            residual = residual + hidden_states
        return self.mlp(self.input_layernorm(residual)), None, residual


class InDictionary(DecoderLayer):
    """Hands on a dictionary."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        return {"hidden_states": hidden_states, "residual": residual}


class DoesNotTell(DecoderLayer):
    """Has a source that does not tell what its pair means."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if positions is None:
            residual = hidden_states
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        return hidden_states, residual


class Streams(torch.nn.Module):  # type: ignore[misc]
    """Has several streams a token, as hyper-connections do."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if hidden_states.dim() == 2:
            hidden_states = hidden_states[:, None].repeat(1, 4, 1)
        return hidden_states * 1.5


class VocabParallelEmbedding(torch.nn.Embedding):  # type: ignore[misc]
    """Has the name of vLLM's."""


class TinyForCausalLM(torch.nn.Module):  # type: ignore[misc]
    """Calls its layers as vLLM's models do, whatever they hand on."""

    supports_eagle3 = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = torch.nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(100, WIDTH)
        self.model.layers = torch.nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.model.norm = RMSNorm()
        self.asked: tuple[int, ...] = ()
        self.order = list(range(LAYERS))
        self.state_of: Callable[[Any, Any], Any] = lambda hidden, residual: hidden + residual
        self.behind_the_embedding: Callable[[Any], Any] = lambda rows: rows
        self.behind_the_norm: Callable[[Any], Any] = lambda rows: rows

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.asked = layers

    def replace_layers(self, layer: type) -> None:
        torch.manual_seed(2)
        self.model.layers = torch.nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden = self.behind_the_embedding(self.model.embed_tokens(input_ids).detach())
        residual, states = None, []
        with torch.no_grad():
            for number in self.order:
                if number in self.asked:
                    states.append(self.state_of(hidden, residual))
                output = self.model.layers[number](positions, hidden, residual)
                if isinstance(output, dict):
                    hidden, residual = output.values()
                elif isinstance(output, tuple):
                    hidden, residual = output[0], output[-1]
                else:
                    hidden = output
            if LAYERS in self.asked:
                states.append(self.state_of(hidden, residual))
            if isinstance(self.model.layers[0], AddsItself):
                hidden = self.model.norm(residual)
            elif residual is None:
                hidden = self.model.norm(hidden)
            else:
                hidden = self.model.norm(hidden, residual)[0]
        hidden = self.behind_the_norm(hidden)
        return (hidden, states) if self.asked else hidden

    def compute_logits(self, hidden_states: Any) -> Any:
        return hidden_states @ self.model.embed_tokens.weight.T


class Runner:
    """Holds its batch as vLLM's first model runner does; what it does wrong is put in from outside."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.model = TinyForCausalLM()
        self.input_batch = SimpleNamespace(req_ids=[])
        self.tell: Callable[[list[str]], list[str]] = lambda order: order
        self.inputs: Callable[[Any, Any], tuple[Any, Any]] = lambda ids, positions: (ids, positions)
        self.padding = 0  # rows in front of the rows
        self.again = False  # a second forward of the same size
        self.halves = False  # two forwards of half the batch
        self.serve: Callable[[Any], Any] = lambda rows: rows

    def execute_model(self, output: Any) -> Any:
        order = sorted(output.num_scheduled_tokens, reverse=True)
        self.input_batch.req_ids = self.tell(order)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ids, positions, ends = [], [], []
        for request in order:
            start, count = computed[request], output.num_scheduled_tokens[request]
            ids += PROMPTS[request][start : start + count]
            positions += range(start, start + count)
            ends.append(len(ids) - 1 + self.padding)
        ids, positions = [0] * self.padding + ids, [0] * self.padding + positions
        given = self.inputs(torch.tensor(ids), torch.tensor(positions))
        if self.halves:
            half = len(ids) // 2
            parts = [
                self._forward(*(one[cut] for one in given)) for cut in (slice(half), slice(half, None))
            ]
            hidden = torch.cat(parts)
        else:
            hidden = self._forward(*given)
        if self.again:
            self._forward(given[0] + 40, given[1])
        return self.model.compute_logits(self.serve(hidden[ends]))

    def _forward(self, ids: Any, positions: Any) -> Any:
        output = self.model(ids, positions)
        return output[0] if isinstance(output, tuple) else output


class SecondRunner(Runner):
    """Tells its order as vLLM's second model runner does."""

    def __init__(self) -> None:
        super().__init__()
        del self.input_batch

    def prepare_inputs(self, output: Any) -> Any:
        return SimpleNamespace(req_ids=self.tell(sorted(output.num_scheduled_tokens, reverse=True)))

    def execute_model(self, output: Any) -> Any:
        self.input_batch = self.prepare_inputs(output)
        try:
            return super().execute_model(output)
        finally:
            del self.input_batch


def step(new: dict[str, int], cached: dict[str, tuple[int, int]] | None = None) -> Any:
    """Make a scheduler output: ``new`` maps requests to tokens, ``cached`` to (computed, tokens)."""
    cached = cached or {}
    scheduled = new | {r: n for r, (_, n) in cached.items()}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, num_computed_tokens=0, prompt_token_ids=PROMPTS[r]) for r in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[start for start, _ in cached.values()]
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
    )


def batch(runner: Any) -> None:
    """Compute the prompts in two steps of about one size: the longest in two chunks."""
    runner.execute_model(step({"r1": 3, "r2": 2}))
    runner.execute_model(step({"r3": 4}, {"r1": (3, 2)}))
