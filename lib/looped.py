"""The looped language model: one definition with four verbs, embed, init_state, step and readout, and their trajectory.

    z_0 = init(e, noise);  z_{t+1} = R(W(z_t, e));  logits = readout(C(z_T));  e = P(x_0)      (axes paper, eqs. 1-5)

Shapes: B batch, T tokens, S tokens seen (T and those in the cache), F fields of a token, A answers, D d_model, Z channels of
the state (D, or 2 D with H/L states: the high one, then the low one), V vocabulary, K loop count.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from lib import exits, noise
from lib.boundary import Boundary
from lib.cache import LoopedCache, slot
from lib.config import LoopedConfig
from lib.experts import Experts, Routes
from lib.layers import INJECTIONS, Attention, Block, Context, DiagonalInjection

ALIGNMENT = 64  # bytes: where torch's own memory starts


class LoopedModel(PreTrainedModel, GenerationMixin):
    """A looped causal language model. Everything it can be is a value of `LoopedConfig`.

    `generate` takes `loops=`, `boundary=`, `state_seed=` and `exit_threshold=` beside transformers' own arguments.
    """

    config_class = LoopedConfig
    base_model_prefix = ""
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # where the configuration ties them

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.prelude = nn.ModuleList(Block(config) for _ in range(config.prelude))
        self.injection = INJECTIONS[config.injection](config) if config.injection != "none" else None
        self.core = nn.ModuleList(Block(config) for _ in range(config.core * (config.loops if config.unrolled else 1)))
        self.coda = nn.ModuleList(Block(config) for _ in range(config.coda))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)  # the readout's norm
        self.boundary_norm = None if config.shared_norm else nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.exit_gate = nn.Linear(config.d_model, 1) if config.exit_gate else None
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """transformers' own, and the weights bitwise as before in what they compute too.

        Views into the file start anywhere, and some processors' kernels sum in another order where memory is not aligned.
        """
        found = super().from_pretrained(*args, **kwargs)
        for p in (found[0] if isinstance(found, tuple) else found).parameters():
            if p.data_ptr() % ALIGNMENT:
                p.data = p.data.clone()
        return found

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.embedding_std)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Attention) and module.qk_bias is not None:
            nn.init.zeros_(module.qk_bias)
        elif isinstance(module, DiagonalInjection | Experts):
            module.reset_parameters()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding, (V, D)."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The unembedding, (V, D)."""
        return self.lm_head

    def context(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        cache: Cache | None = None,
        routes: Routes | None = None,
    ) -> Context:
        """Rotary tables, mask, cache and routes for one pass.

        ids: (B, T) or (B, T, F); attention_mask: (B, S), 1 at real tokens. Positions count from each row's first real token,
        so left padding moves nothing. segments: (B, T) numbers; a token sees only tokens of its own segment, and positions
        are not counted anew. Raises ValueError when shapes do not fit.
        """
        B, T = ids.shape[:2]
        past = 0 if cache is None else cache.get_seq_length()
        S, dtype = past + T, self.embed_tokens.weight.dtype
        for name, given, shape in (("attention_mask", attention_mask, (B, S)), ("segments", segments, (B, S))):
            if given is not None and tuple(given.shape) != shape:
                raise ValueError(
                    f"{name} is {tuple(given.shape)}: it must be {shape}, one number a token, cached ones included"
                )
        padded = attention_mask is not None and not bool(attention_mask.all())
        positions = torch.arange(S, device=ids.device)[None]
        if padded:
            positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        mask = None
        if padded or segments is not None or (past and T > 1):
            mask = torch.ones(T, S, dtype=torch.bool, device=ids.device).tril(past)[None]
            if padded:
                mask = mask & attention_mask.bool()[:, None]
            if segments is not None:
                mask = mask & (segments[:, past:, None] == segments[:, None])
            # a padding query looks at itself: a row with nothing to look at would be NaN
            mask = (mask | torch.ones_like(mask).tril(past).triu(past))[:, None]
        return Context(positions[:, past:], mask, self.config, dtype, cache, routes)

    def tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """x_0, the token embeddings. ids: (B, T), or (B, T, F) whose fields' embeddings add -> (B, T, D)."""
        x = self.embed_tokens(ids)
        if ids.dim() == 3:
            x = x.sum(dim=2)
        return x * self.config.embedding_scale if self.config.embedding_scale != 1 else x

    def embed(self, ids: torch.Tensor, context: Context | None = None) -> torch.Tensor:
        """e = P(x_0), tokens through the prelude. ids: (B, T) or (B, T, F) -> (B, T, D)."""
        return self._prelude(self.tokens(ids), context)

    def _prelude(self, x: torch.Tensor, context: Context | None) -> torch.Tensor:
        if self.prelude:
            context = context or self.context(x)
            for i, block in enumerate(self.prelude):
                x = block(x, context, slot(self.config, "prelude", i))
        return x

    def init_state(self, e: torch.Tensor, xi: torch.Tensor | None = None) -> torch.Tensor:
        """z_0 from the input, zeros, or noise scaled by state_std. e: (B, T, D), xi: (B, T, D) of unit scale -> (B, T, Z).

        Without `xi`, a noise state takes the configuration's own noise at positions 0..T-1 in every row. Of H/L states this is
        the low one; the high one starts from e.
        """
        return self._beside(e, self._start(e, xi))

    def _beside(self, e: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return z if self.config.state == "single" else torch.cat((e, z), dim=-1)

    def _start(self, e: torch.Tensor, xi: torch.Tensor | None) -> torch.Tensor:
        if self.config.state_init == "input":
            return e
        if self.config.state_init == "zeros":
            return torch.zeros_like(e)
        if xi is None:
            xi = noise.state_noise(torch.arange(e.shape[1], device=e.device)[None], e.shape[2], self.config.state_noise)
        wide = torch.promote_types(xi.dtype, e.dtype)  # one rounding
        return (xi.to(wide) * self.config.state_std).to(e).expand(e.shape)

    def step(
        self, z: torch.Tensor, e: torch.Tensor, t: int, boundary: Boundary, context: Context | None = None
    ) -> torch.Tensor:
        """One loop step, t counted from 0: normalise the INPUT if the boundary fires after step t - 1, inject e, apply the
        core, return the RAW state. z: (B, T, Z), e: (B, T, D) -> (B, T, Z).

        e is what `embed` gives, or `tokens` where injection_source is tokens. H/L states: the input is their sum, and step t
        replaces one of them. Raises ValueError for a step that an unrolled core has no layers for.
        """
        states = z.split(self.config.d_model, dim=-1)
        x = sum(states[1:], states[0])
        if boundary.fires_before(t):
            x = self.normalise(x)
        if self.injection is not None:
            x = self.injection(x, e)
        context = context or self.context(e)
        for i, block in enumerate(self._layers_of(t)):
            x = block(x, context, slot(self.config, "core", i, t))
        if len(states) == 1:
            return x
        high, low = states
        return torch.cat((high, x) if self.config.updates_low(t) else (x, low), dim=-1)

    def _layers_of(self, t: int) -> list[nn.Module]:
        """The layers that loop step t executes, in order."""
        c, layers = self.config, list(self.core)
        if c.unrolled:
            self._require_layers(t + 1)
            layers = layers[t * c.core : (t + 1) * c.core]
        elif c.state == "split":
            layers = layers[c.core // 2 :] if c.updates_low(t) else layers[: c.core // 2]
        return layers * c.repeats

    def _require_layers(self, loops: int) -> None:
        if self.config.unrolled and loops > self.config.loops:
            raise ValueError(
                f"loops is {loops}: it must be at most {self.config.loops}, the steps an unrolled core has layers for"
            )

    def normalise(self, z: torch.Tensor) -> torch.Tensor:
        """The loop-boundary norm. z: (B, T, D) -> (B, T, D)."""
        return (self.norm if self.boundary_norm is None else self.boundary_norm)(z)

    def readout(
        self, z: torch.Tensor, answer_positions: torch.Tensor | None = None, context: Context | None = None
    ) -> torch.Tensor:
        """Logits of a raw state: coda, norm, head; the raw readout omits the norm; Huginn's order also norms before the coda.

        z: (B, T, Z) -> (B, T, V), or (B, A, V) at answer_positions, (A,) shared by all rows or (B, A). Of H/L states the high
        one is read.
        """
        z = z[..., : self.config.d_model]
        normed = self.config.readout == "normalised"
        if self.coda:
            context = context or self.context(z)
            if normed and self.config.readout_order == "norm_coda_norm":
                z = self.norm(z)
            for i, block in enumerate(self.coda):
                z = block(z, context, slot(self.config, "coda", i))
        if answer_positions is not None:
            z = at_positions(z, answer_positions)
        return self.lm_head(self.norm(z) if normed else z)

    def trajectory(
        self,
        ids: torch.Tensor,
        loops: int | None = None,
        boundary: Boundary | None = None,
        initial_state: torch.Tensor | None = None,
        state_seed: int | None = None,
        state_rows: torch.Tensor | None = None,
        context: Context | None = None,
        backprop: int | None = None,
    ) -> Iterator[torch.Tensor]:
        """The raw states z_1 .. z_loops in order, each (B, T, Z). Defaults: the trained loop count and boundary.

        initial_state: (B, T, D) replaces the noise, zeros or input that a state starts from, of H/L states the low one;
        state_seed picks that noise (None: the configuration's own, which for "hash" takes no seed); state_rows: (B,) row
        numbers that enter that hash, 0 by default. backprop: gradients flow through the last so many steps alone. Raises
        ValueError when loops is below 1 or above an unrolled core's own, or initial_state has another shape.
        """
        loops = self.config.loops if loops is None else loops
        if isinstance(loops, bool) or not isinstance(loops, int) or loops < 1:
            raise ValueError(f"loops is {loops!r}: it must be a whole number, at least 1")
        self._require_layers(loops)
        boundary = Boundary(self.config.boundary) if boundary is None else boundary
        if not isinstance(boundary, Boundary):
            raise ValueError(f"boundary is {boundary!r}: it must be `never` or `every(k)` of lib.boundary")
        context = context or self.context(ids)
        if isinstance(context.cache, LoopedCache):
            context.cache.hold(loops, boundary)
        x = self.tokens(ids)
        e = self._prelude(x, context)
        if initial_state is not None:
            if initial_state.shape != e.shape:
                raise ValueError(f"initial_state is {tuple(initial_state.shape)}: it must be {tuple(e.shape)}, as the input")
            z = self._beside(e, initial_state)
        elif self.config.state_init == "noise":
            kind, D = self.config.state_noise, self.config.d_model
            z = self.init_state(e, noise.state_noise(context.positions, D, kind, state_seed, state_rows))
        else:
            z = self.init_state(e)
        injected = e if self.config.injection_source == "prelude" else x
        for t in range(loops):
            with torch.set_grad_enabled(torch.is_grad_enabled() and (backprop is None or t >= loops - backprop)):
                z = self.step(z, injected, t, boundary, context)
            yield z

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loops: int | None = None,
        boundary: Boundary | None = None,
        answer_positions: torch.Tensor | None = None,
        initial_state: torch.Tensor | None = None,
        state_seed: int | None = None,
        state_rows: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        exit_threshold: float | None = None,
        backprop: int | None = None,
        routes: Routes | None = None,
        cache: Cache | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
    ) -> CausalLMOutputWithPast:
        """Logits after `loops` steps (the trained count by default), and the mean loss when labels are given.

        input_ids: (B, T) or (B, T, F) -> logits (B, T, V) with next-token labels (B, T), or (B, A, V) with labels (B, A) read
        at answer_positions. Label -100 is ignored. exit_threshold below 1: each token is read at its own loop step, see
        `exits`. With a cache, input_ids are the tokens that are not in it yet. logits_to_keep: the last so many alone, 0 all.
        routes: records what routers choose, or forces it, see `experts`. For the rest see `trajectory` and `context`.
        """
        if cache is None and use_cache:
            cache = LoopedCache()
        context = self.context(input_ids, attention_mask, segments, cache, routes)
        states = self.trajectory(input_ids, loops, boundary, initial_state, state_seed, state_rows, context, backprop)
        threshold = self.config.exit_threshold if exit_threshold is None else exit_threshold
        if threshold < 1:
            states = list(states)
            last = exits.at_steps(states, exits.steps(exits.distribution(exits.gate_logits(self, states)), threshold))
        else:
            *_, last = states
        if logits_to_keep and answer_positions is None:
            T = input_ids.shape[1]
            answer_positions = torch.arange(max(0, T - logits_to_keep), T, device=input_ids.device)
        logits = self.readout(last, answer_positions, context)
        loss = None
        if labels is not None:
            aligned, target = (logits, labels) if answer_positions is not None else (logits[:, :-1], labels[:, 1:])
            loss = F.cross_entropy(aligned.flatten(0, 1), target.flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)

    def generate(self, inputs: torch.Tensor | None = None, *args, attention_mask: torch.Tensor | None = None, **kwargs):
        """transformers' `generate`, with a cache that has a slot for every layer and loop step unless use_cache is False.

        Rows padded on the right are generated as if padded on the left, since new tokens follow the last column; the prompt
        comes back as it was given. Without attention_mask, a padding token that ends no text is taken for padding. Raises
        ValueError for a mask of another shape, another kind of cache, and rows padded on the right with a cache of one's own.
        """
        settings = next((a for a in args if isinstance(a, GenerationConfig)), kwargs.get("generation_config"))
        settings = settings or self.generation_config
        kind = kwargs.pop("cache_implementation", None) or settings.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation is {kind!r}: it must be 'dynamic', one slot a layer and loop step")
        own = kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None
        if not own and kwargs.get("use_cache", settings.use_cache) is not False:
            kwargs["cache"] = LoopedCache()
        ids = given = kwargs.pop("input_ids", None) if inputs is None else inputs
        if ids is not None:
            pad, stop = (kwargs.get(key, getattr(settings, key)) for key in ("pad_token_id", "eos_token_id"))
            stops = stop if isinstance(stop, list) else [stop]
            if attention_mask is None and pad is not None and pad not in stops and bool((ids == pad).any()):
                attention_mask = (ids != pad).long()
            if attention_mask is not None and attention_mask.shape != ids.shape:
                raise ValueError(
                    f"attention_mask is {tuple(attention_mask.shape)}: it must be {tuple(ids.shape)}, as input_ids"
                )
            if attention_mask is not None and not bool(attention_mask[:, -1].all()):
                if own:
                    raise ValueError("rows are padded on the right and a cache is given: pad them on the left")
                order = attention_mask.bool().to(torch.uint8).argsort(dim=1, stable=True)  # padding first, the rest in order
                ids, attention_mask = ids.gather(1, order), attention_mask.gather(1, order)
        out = super().generate(ids, *args, attention_mask=attention_mask, **kwargs)
        if ids is not given:
            tokens = out if isinstance(out, torch.Tensor) else out.sequences
            tokens[:, : given.shape[1]] = given.repeat_interleave(len(tokens) // len(given), dim=0)
        return out


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
