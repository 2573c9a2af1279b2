"""A Decision Transformer (Chen et al., 2021, arXiv 2106.01345) in Flax NNX."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
      observation_size, action_size: widths of one step.
      context: K, the steps that the model looks back on.
      episode_steps: the largest timestep plus one.
      width, layers, heads: of the transformer.
      conditioned: whether the model sees the return-to-go; without, it clones the average behaviour.
      compute: dtype that the blocks compute in. Parameters, what goes in and what comes out are float32.
    """

    observation_size: int
    action_size: int
    context: int
    episode_steps: int
    width: int = 64
    layers: int = 2
    heads: int = 4
    conditioned: bool = True
    compute: str = "float32"


class Block(nnx.Module):
    """Pre-norm causal self-attention followed by a two-layer perceptron."""

    def __init__(self, width: int, heads: int, compute: str, rngs: nnx.Rngs):
        self.heads = heads
        self.norm_attention = nnx.LayerNorm(width, dtype=compute, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, dtype=compute, rngs=rngs)
        self.merge = nnx.Linear(width, width, dtype=compute, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(width, dtype=compute, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, dtype=compute, rngs=rngs)
        self.shrink = nnx.Linear(4 * width, width, dtype=compute, rngs=rngs)

    def __call__(self, x: jax.Array, attend: jax.Array) -> jax.Array:
        """Maps tokens [B, N, width] to tokens; `attend`, bool[B, 1, N, N], says who may look at whom."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], mask=attend)
        x = x + self.merge(mixed.reshape(batch, tokens, width))
        return x + self.shrink(nnx.gelu(self.expand(self.norm_mlp(x))))


class DecisionTransformer(nnx.Module):
    """Predicts each step's action from the return that is still to come, the states and the actions before it.

    The tokens of a step are (return-to-go, observation, action), in that order; the action is read off the
    observation's token, which the causal mask keeps from seeing the action itself.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width = config.width
        self.config = config
        self.embed_return = nnx.Linear(1, width, rngs=rngs)
        self.embed_observation = nnx.Linear(config.observation_size, width, rngs=rngs)
        self.embed_action = nnx.Linear(config.action_size, width, rngs=rngs)
        self.embed_timestep = nnx.Embed(
            config.episode_steps, width, embedding_init=nnx.initializers.normal(0.02), rngs=rngs
        )
        self.norm_in = nnx.LayerNorm(width, rngs=rngs)
        self.blocks = nnx.List([Block(width, config.heads, config.compute, rngs) for _ in range(config.layers)])
        self.norm_out = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, config.action_size, rngs=rngs)

    def __call__(
        self,
        return_to_go: jax.Array,
        observation: jax.Array,
        action: jax.Array,
        timestep: jax.Array,
        mask: jax.Array,
    ) -> jax.Array:
        """Predicts the action of every step of a batch of windows.

        Args:
          return_to_go: float32[B, K], scaled to order one.
          observation: float32[B, K, observation_size], normalised.
          action: float32[B, K, action_size]; the last one is not looked at by any prediction.
          timestep: int32[B, K].
          mask: bool[B, K], False where a step is padding.

        Returns:
          float32[B, K, action_size] within (-1, 1).
        """
        batch, steps = mask.shape
        if not self.config.conditioned:
            return_to_go = jnp.zeros_like(return_to_go)
        when = self.embed_timestep(timestep)
        tokens = jnp.stack(
            [
                self.embed_return(return_to_go[..., None]) + when,
                self.embed_observation(observation) + when,
                self.embed_action(action) + when,
            ],
            axis=2,
        ).reshape(batch, 3 * steps, self.config.width)
        x = self.norm_in(tokens).astype(self.config.compute)
        attend = causal_mask(mask)
        for block in self.blocks:
            x = block(x, attend)
        seen = self.norm_out(x.astype(jnp.float32)).reshape(batch, steps, 3, self.config.width)[:, :, 1]
        return jnp.tanh(self.head(seen))


def causal_mask(mask: jax.Array) -> jax.Array:
    """Who may look at whom: bool[B, 1, 3K, 3K] for the step mask bool[B, K].

    Nobody looks ahead and nobody looks at padding, except that every token sees itself, so that no row is empty.
    """
    steps = mask.shape[1]
    causal = jnp.tril(jnp.ones((3 * steps, 3 * steps), bool))
    real = jnp.repeat(mask, 3, axis=1)
    return (causal[None] & real[:, None, :] | jnp.eye(3 * steps, dtype=bool)[None])[:, None]
