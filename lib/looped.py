"""The looped language model: one definition with four verbs, embed, init_state, step and readout, and their trajectory.

    z_0 = init(e, noise);  z_{t+1} = R(W(z_t, e));  logits = readout(C(z_T));  e = P(x_0)      (axes paper, eqs. 1-5)

Shapes: B batch, T tokens, F fields of a token, A answers, D d_model, V vocabulary, K loop count.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from lib.boundary import Boundary
from lib.config import LoopedConfig
from lib.layers import Block, Context


def state_noise(positions: torch.Tensor, d_model: int, seed: int) -> torch.Tensor:
    """Standard normal noise that depends only on (seed, position): cache, padding and batch cannot change it.

    positions: (B, T) whole numbers counted from each row's first real token -> (B, T, D) float32.
    """
    wanted, where = torch.unique(positions.clamp(min=0), return_inverse=True)
    rows = [np.random.Generator(np.random.Philox(key=[seed, int(p)])).standard_normal(d_model) for p in wanted]
    return torch.as_tensor(np.stack(rows), dtype=torch.float32, device=positions.device)[where]


class LoopedModel(PreTrainedModel):
    """A looped causal language model. Everything it can be is a value of `LoopedConfig`.

    Generation, caches, injection, H/L states and experts attach to the four verbs and are not built yet.
    """

    config_class = LoopedConfig
    base_model_prefix = ""
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.prelude = nn.ModuleList(Block(config) for _ in range(config.prelude))
        self.core = nn.ModuleList(Block(config) for _ in range(config.core))
        self.coda = nn.ModuleList(Block(config) for _ in range(config.coda))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)  # the readout's norm
        self.boundary_norm = None if config.shared_norm else nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.embedding_std)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding, (V, D)."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The unembedding, (V, D)."""
        return self.lm_head

    def context(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Context:
        """Rotary tables and mask for one pass. ids: (B, T) or (B, T, F); attention_mask: (B, T), 1 at real tokens.

        Positions count from each row's first real token, so left padding moves nothing.
        """
        T, dtype = ids.shape[1], self.embed_tokens.weight.dtype
        if attention_mask is None or bool(attention_mask.all()):
            return Context(torch.arange(T, device=ids.device)[None], None, self.config, dtype)
        real = attention_mask.bool()
        causal = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        # a padding query looks at itself: a row with nothing to look at would be NaN
        mask = (causal & real[:, None]) | torch.eye(T, dtype=torch.bool, device=ids.device)
        return Context((real.cumsum(1) - 1).clamp(min=0), mask[:, None], self.config, dtype)

    def embed(self, ids: torch.Tensor, context: Context | None = None) -> torch.Tensor:
        """e = P(x_0), tokens through the prelude. ids: (B, T), or (B, T, F) whose fields' embeddings add -> (B, T, D)."""
        e = self.embed_tokens(ids)
        if ids.dim() == 3:
            e = e.sum(dim=2)
        if self.prelude:
            context = context or self.context(ids)
            for block in self.prelude:
                e = block(e, context)
        return e

    def init_state(self, e: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """z_0 from the input, zeros, or noise scaled by state_std. e: (B, T, D), noise: (B, T, D) standard normal -> (B, T, D).

        Without `noise`, a noise state takes `state_noise` of seed 0 at positions 0..T-1 in every row.
        """
        if self.config.state_init == "input":
            return e
        if self.config.state_init == "zeros":
            return torch.zeros_like(e)
        if noise is None:
            noise = state_noise(torch.arange(e.shape[1], device=e.device)[None], e.shape[2], seed=0).expand(e.shape)
        return noise.to(e) * self.config.state_std

    def step(
        self, z: torch.Tensor, e: torch.Tensor, t: int, boundary: Boundary, context: Context | None = None
    ) -> torch.Tensor:
        """One loop step, t counted from 0: normalise the INPUT if the boundary fires after step t - 1, apply the core, return
        the RAW state. z, e: (B, T, D) -> (B, T, D)."""
        if boundary.fires_before(t):
            z = self.normalise(z)
        context = context or self.context(z)
        for block in self.core:  # injection W(z, e) goes in front of this loop
            z = block(z, context)
        return z

    def normalise(self, z: torch.Tensor) -> torch.Tensor:
        """The loop-boundary norm. z: (B, T, D) -> (B, T, D)."""
        return (self.norm if self.boundary_norm is None else self.boundary_norm)(z)

    def readout(
        self, z: torch.Tensor, answer_positions: torch.Tensor | None = None, context: Context | None = None
    ) -> torch.Tensor:
        """Logits of a raw state: coda, norm, head; the raw readout omits the norm; Huginn's order also norms before the coda.

        z: (B, T, D) -> (B, T, V), or (B, A, V) at answer_positions, (A,) shared by all rows or (B, A).
        """
        normed = self.config.readout == "normalised"
        if self.coda:
            context = context or self.context(z)
            if normed and self.config.readout_order == "norm_coda_norm":
                z = self.norm(z)
            for block in self.coda:
                z = block(z, context)
        if answer_positions is not None:
            z = at_positions(z, answer_positions)
        return self.lm_head(self.norm(z) if normed else z)

    def trajectory(
        self,
        ids: torch.Tensor,
        loops: int | None = None,
        boundary: Boundary | None = None,
        initial_state: torch.Tensor | None = None,
        state_seed: int = 0,
        context: Context | None = None,
    ) -> Iterator[torch.Tensor]:
        """The raw states z_1 .. z_loops in order, each (B, T, D). Defaults: the trained loop count and boundary.

        initial_state: (B, T, D) replaces init_state; state_seed picks the noise where the state starts from noise.
        Raises ValueError when loops is below 1.
        """
        loops = self.config.loops if loops is None else loops
        if loops < 1:
            raise ValueError(f"loops is {loops}: it must be at least 1")
        boundary = Boundary(self.config.boundary) if boundary is None else boundary
        context = context or self.context(ids)
        e = self.embed(ids, context)
        if initial_state is not None:
            z = initial_state
        elif self.config.state_init == "noise":
            z = self.init_state(e, state_noise(context.positions, self.config.d_model, state_seed).expand(e.shape))
        else:
            z = self.init_state(e)
        for t in range(loops):
            z = self.step(z, e, t, boundary, context)
            yield z

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loops: int | None = None,
        boundary: Boundary | None = None,
        answer_positions: torch.Tensor | None = None,
        initial_state: torch.Tensor | None = None,
        state_seed: int = 0,
    ) -> CausalLMOutput:
        """Logits after `loops` steps (the trained count by default), and the mean loss when labels are given.

        input_ids: (B, T) or (B, T, F) -> logits (B, T, V) with next-token labels (B, T), or (B, A, V) with labels (B, A) read
        at answer_positions. Label -100 is ignored.
        """
        context = self.context(input_ids, attention_mask)
        *_, last = self.trajectory(input_ids, loops, boundary, initial_state, state_seed, context)
        logits = self.readout(last, answer_positions, context)
        loss = None
        if labels is not None:
            aligned, target = (logits, labels) if answer_positions is not None else (logits[:, :-1], labels[:, 1:])
            loss = F.cross_entropy(aligned.flatten(0, 1), target.flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def at_positions(z: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """z: (B, T, D) at positions (A,) shared by all rows, or (B, A) -> (B, A, D)."""
    if positions.dim() == 1:
        return z[:, positions]
    return z.gather(1, positions[..., None].expand(-1, -1, z.shape[-1]))


def build(config: LoopedConfig, seed: int) -> LoopedModel:
    """A freshly initialised model, a function of (config, seed) alone; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LoopedModel(config)


AutoModelForCausalLM.register(LoopedConfig, LoopedModel)
