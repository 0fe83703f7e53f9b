"""Our own decoder: a Llama-like network built from a Model record, so that plans run without anybody's checkpoint.

The initial value of each weight depends on the seed and the weight's name alone, never on the layout or the rank.
"""

import zlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from cost_models.records import Model, Norm, Positions
from executor.errors import RefusedError

ROPE_THETA = 10000.0
"""Base of the rotary frequencies (Su et al. 2021, section 3.2.2)."""
INIT_STD = 0.02
"""Standard deviation of the initial weights (GPT-2's, as most decoders since)."""
NORM_EPS = 1e-5
"""Added to the mean square (Llama 2 and 3)."""


class Rotary(nn.Module):
    """Cosines and sines of the rotary embedding, for a head of even width."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        frequency = ROPE_THETA ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.frequency = nn.Buffer(frequency, persistent=False)

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(1, T) positions -> cos and sin, each (1, T, head_dim), in the dtype of `hidden_states`."""
        angle = position_ids[..., None].float() * self.frequency.float()
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().to(hidden_states.dtype), angle.sin().to(hidden_states.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the heads of `x` (B, heads, T, head_dim) by their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class RmsNorm(nn.RMSNorm):
    """torch's RMSNorm, its weight in the dtype of the input: otherwise torch leaves its fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden)."""
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        kv_width = model.kv_heads * model.head_dim
        self.q = nn.Linear(model.hidden, model.query_width, bias=model.qkv_bias)
        self.k = nn.Linear(model.hidden, kv_width, bias=model.qkv_bias)
        self.v = nn.Linear(model.hidden, kv_width, bias=model.qkv_bias)
        self.o = nn.Linear(model.query_width, model.hidden, bias=model.linear_bias)

    def forward(self, *, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden); heads are counted from the projections, which may hold a part of them."""
        batch, seq = hidden_states.shape[:2]
        q, k, v = (
            projection(hidden_states).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        q, k = rotate(q, *position_embeddings), rotate(k, *position_embeddings)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(out.transpose(1, 2).reshape(batch, seq, -1))


class Mlp(nn.Module):
    """SwiGLU where the model has a gate, else two matrices with GELU between them."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, bias=model.linear_bias) if model.gated_mlp else None
        self.up = nn.Linear(model.hidden, model.ffn, bias=model.linear_bias)
        self.down = nn.Linear(model.ffn, model.hidden, bias=model.linear_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden)."""
        inner = functional.gelu(self.up(x)) if self.gate is None else functional.silu(self.gate(x)) * self.up(x)
        return self.down(inner)


class Layer(nn.Module):
    """Attention and MLP, each behind its norm and beside the residual stream."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention_norm = _norm(model)
        self.attention = Attention(model)
        self.mlp_norm = _norm(model)
        self.mlp = Mlp(model)

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden)."""
        attended = self.attention(
            hidden_states=self.attention_norm(hidden_states), position_embeddings=position_embeddings
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class Decoder(nn.Module):
    """Embedding, layers, norm, head. Token ids (B, T) -> logits (B, T, vocab)."""

    def __init__(self, model: Model, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        _check(model)
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.norm = _norm(model)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        self.rotary = Rotary(model.head_dim)
        if model.tie_embeddings:
            self.head.weight = self.embedding.weight
        initialise(self, seed)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, vocab)."""
        hidden = self.embedding(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rope = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rope)
        return self.head(self.norm(hidden))


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Matrices ~ N(0, INIT_STD²), each from its own generator, seeded by `seed` and the name; biases 0, norms 1."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            # torch's CPU generator reads 32 bits of a seed, so seed and name are mixed into as many.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            parameter.normal_(0.0, INIT_STD, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _norm(model: Model) -> nn.Module:
    if model.norm is Norm.RMSNORM:
        return RmsNorm(model.hidden, eps=NORM_EPS)
    return nn.LayerNorm(model.hidden, eps=NORM_EPS)


def _check(model: Model) -> None:
    """Refuse by name what this decoder does not compute."""
    missing = {
        "a chain of unlike layers (layer_groups)": bool(model.layer_groups),
        "attention that is not causal": not model.causal,
        "mixture of experts": model.moe is not None,
        "latent attention (MLA)": model.mla is not None,
        "multi-token prediction": model.num_mtp_layers > 0,
        f"{model.positions} positions (rope alone)": model.positions is not Positions.ROPE,
        "norms of queries and keys": model.qk_norm,
        "sliding-window attention": model.sliding_window is not None,
        f"{model.norms_per_layer} norms per layer (2 alone)": model.norms_per_layer != 2,
        f"an odd head_dim ({model.head_dim})": model.head_dim % 2 == 1,
    }
    absent = [name for name, wanted in missing.items() if wanted]
    if absent:
        raise RefusedError(
            f"model {model.name!r}: Meshwright's own decoder has not yet: {', '.join(absent)}. Run a dense model with rotary "
            "positions, or give your own module with --module"
        )
