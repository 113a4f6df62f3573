"""The model: the mathematics of Qwen3-MoE in a form that trains fast on two CPU cores.

Owns the training module and its fused loss. Parameters carry the names and shapes that transformers
uses inside, so that the export is a renaming, not a conversion.
Master weights are float32; matrix products run in `compute_dtype`.

Shapes: B sequences, L positions, T = B * L tokens, D hidden, H heads, E experts, K experts a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

LOSS_CHUNK_TOKENS = 1024
ATTENTION_BLOCK = 128
ROPE_THETA = 10_000.0
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 128
    context_len: int = 2048


class _Permute(torch.autograd.Function):
    """Gather rows by a permutation; backward gathers by its inverse; autograd would scatter."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Dispatch(torch.autograd.Function):
    """Copy each token to its K experts' places: row i of the result is token order[i] // K."""

    @staticmethod
    def forward(ctx, x, order, inverse, top_k):
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.index_select(0, ctx.saved_tensors[0])
        return grad.view(-1, ctx.top_k, grad.shape[-1]).sum(1), None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `x @ weight.T`, a chunk of tokens at a time, gradients included.

    The logits of a whole batch would be the largest tensor of the step by far; a chunk of them
    stays near the cache, and its gradient is taken while it is there.
    """

    @staticmethod
    def forward(ctx, x, weight, targets):
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, x.shape[0], LOSS_CHUNK_TOKENS):
            rows = slice(start, start + LOSS_CHUNK_TOKENS)
            part, target = x[rows], targets[rows, None]
            log_probs = functional.log_softmax((part @ weight.t()).float(), dim=-1)
            total -= log_probs.gather(1, target).sum()
            grad = log_probs.exp_()
            grad.scatter_add_(1, target, torch.full(target.shape, -1.0))
            grad = grad.to(x.dtype)
            grad_x[rows] = grad @ weight
            grad_weight += grad.t() @ part
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.num_tokens = x.shape[0]
        return (total / x.shape[0]).float()

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight = ctx.saved_tensors
        scale = grad / ctx.num_tokens
        return grad_x * scale.to(grad_x.dtype), (grad_weight * scale).to(grad_x.dtype), None


class Norm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight, NORM_EPS)


class Linear(nn.Module):
    """A matrix without bias, applied in the input's type."""

    def __init__(self, size_in: int, size_out: int, std: float):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size_out, size_in) * std)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Grouped-query attention with per-head norms and rotary positions."""

    def __init__(self, shape: Shape, std: float, std_out: float):
        super().__init__()
        self.shape = shape
        query_size = shape.num_heads * shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, query_size, std)
        self.k_proj = Linear(shape.hidden_size, kv_size, std)
        self.v_proj = Linear(shape.hidden_size, kv_size, std)
        self.o_proj = Linear(query_size, shape.hidden_size, std_out)
        self.q_norm = Norm(shape.head_dim)
        self.k_norm = Norm(shape.head_dim)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self.shape.head_dim)
        query = _rotate(self.q_norm(self.q_proj(x).view(split)), rotary).to(x.dtype)
        key = _rotate(self.k_norm(self.k_proj(x).view(split)), rotary).to(x.dtype)
        value = self.v_proj(x).view(split)
        group = self.shape.num_heads // self.shape.num_kv_heads
        key, value = (t.repeat_interleave(group, dim=2).transpose(1, 2) for t in (key, value))
        out = _attend(query.transpose(1, 2), key, value)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over [B, H, L, head_dim].

    On a CPU plain products in bfloat16 are two to four times as fast, gradients included, as the
    fused kernel. Blocks of queries leave out most of the keys that the mask would hide.
    """
    if query.dtype != torch.bfloat16:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    query = query * query.shape[-1] ** -0.5
    hidden = torch.full((ATTENTION_BLOCK, ATTENTION_BLOCK), -torch.inf, dtype=query.dtype).triu(1)
    outs = []
    for start in range(0, query.shape[2], ATTENTION_BLOCK):
        part = query[:, :, start : start + ATTENTION_BLOCK]
        size = part.shape[2]
        scores = part @ key[:, :, : start + size].mT
        scores[..., start:] += hidden[:size, :size]
        outs.append(scores.softmax(dim=-1) @ value[:, :, : start + size])
    return torch.cat(outs, dim=2)


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2), in float32."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def build_rotary(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position and frequency, shaped to broadcast over [B, L, H, half]."""
    inverse = ROPE_THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)[None, :, None, :]
    return angles.cos(), angles.sin()


class Router(nn.Module):
    """Scores of the experts."""

    def __init__(self, shape: Shape, std: float):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape.num_experts, shape.hidden_size) * std)


class Experts(nn.Module):
    """All experts' SwiGLU matrices, stacked; gate above up."""

    def __init__(self, shape: Shape, std: float, std_out: float):
        super().__init__()
        num, inner, hidden = shape.num_experts, shape.expert_size, shape.hidden_size
        self.gate_up_proj = nn.Parameter(torch.randn(num, 2 * inner, hidden) * std)
        self.down_proj = nn.Parameter(torch.randn(num, hidden, inner) * std_out)


class MoeBlock(nn.Module):
    """Top-k routed experts. Keeps the balance loss and load of the last call."""

    def __init__(self, shape: Shape, std: float, std_out: float):
        super().__init__()
        self.shape = shape
        self.gate = Router(shape, std)
        self.experts = Experts(shape, std, std_out)
        self.balance_loss = torch.zeros(())
        self.load = torch.zeros(shape.num_experts)

    def forward(self, x_TD: Tensor) -> Tensor:
        num_experts, top_k = self.shape.num_experts, self.shape.top_k
        # Routing stays in float32 while training: ties between experts are costly to get wrong.
        probs_TE = functional.linear(x_TD.float(), self.gate.weight).softmax(dim=-1)
        weights_TK, ids_TK = probs_TE.topk(top_k, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        counts = torch.bincount(ids_TK.flatten(), minlength=num_experts)
        self.load = counts.float() / counts.sum()
        self.balance_loss = num_experts * (self.load * probs_TE.mean(0)).sum()

        order = ids_TK.flatten().argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        rows = _Dispatch.apply(x_TD, order, inverse, top_k).split(counts.tolist())
        gate_ups = self.experts.gate_up_proj.to(x_TD.dtype).unbind(0)
        downs = self.experts.down_proj.to(x_TD.dtype).unbind(0)
        outs = []
        for part, gate_up, down in zip(rows, gate_ups, downs, strict=True):
            gate, up = functional.linear(part, gate_up).chunk(2, dim=-1)
            outs.append(functional.linear(functional.silu(gate) * up, down))
        out = _Permute.apply(torch.cat(outs), inverse, order).view(*ids_TK.shape, -1)
        return (out * weights_TK[..., None].to(out.dtype)).sum(1)


class Layer(nn.Module):
    """Attention, then experts, each behind a norm and added to the residual stream."""

    def __init__(self, shape: Shape, std: float, std_out: float):
        super().__init__()
        self.self_attn = Attention(shape, std, std_out)
        self.mlp = MoeBlock(shape, std, std_out)
        self.input_layernorm = Norm(shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x).to(dtype), rotary)
        flat = self.post_attention_layernorm(x).to(dtype).flatten(0, 1)
        return x + self.mlp(flat).view(x.shape)


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, shape: Shape, std: float, std_out: float):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=std)
        self.layers = nn.ModuleList(Layer(shape, std, std_out) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size)


class DemoModel(nn.Module):
    """The training module; the output matrix is the embedding."""

    def __init__(self, shape: Shape, compute_dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.shape = shape
        self.compute_dtype = compute_dtype
        std = 0.02
        self.model = Decoder(shape, std, std / (2 * shape.num_layers) ** 0.5)

    def encode(self, ids_BL: Tensor) -> Tensor:
        """Final hidden states [B, L, D] in `compute_dtype`."""
        rotary = build_rotary(ids_BL.shape[1], self.shape.head_dim)
        x = self.model.embed_tokens(ids_BL)
        for layer in self.model.layers:
            x = layer(x, rotary, self.compute_dtype)
        return self.model.norm(x).to(self.compute_dtype)

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Logits [B, L, vocab] in float32."""
        return functional.linear(self.encode(ids_BL), self._output_weight()).float()

    def compute_loss(self, ids_BL: Tensor, targets_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy, and mean balance loss (1 when the experts share evenly)."""
        hidden = self.encode(ids_BL).flatten(0, 1)
        loss = _LinearCrossEntropy.apply(hidden, self._output_weight(), targets_BL.flatten())
        balance = torch.stack([layer.mlp.balance_loss for layer in self.model.layers]).mean()
        return loss, balance

    def _output_weight(self) -> Tensor:
        return self.model.embed_tokens.weight.to(self.compute_dtype)
