"""The mixture-of-experts feed-forward, the record of what its routers chose, and the measures of that record.

Source: axes paper, MoE, and its published code (`moe.py`, `router.py`): sigmoid router, top k of E, weights normalised over the
chosen k, no shared expert, no capacity, no token dropped.

Shapes: B batch, T tokens, N = B T, D d_model, E experts, F width of one expert, k experts a token, M = N k rows (a row is a
token at one of its experts; rows lie sorted by expert), X executions.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

REUSE = ("none", "first", "random")


class Experts(nn.Module):
    """sum_i g_i down_i(silu(gate_i x) * up_i x) over the k experts a token is routed to. (B, T, D) -> (B, T, D).

    A router's logits are formed in the activations' type and its scores in at least float32, as in the published code.
    """

    def __init__(self, config):
        super().__init__()
        D, width, E = config.d_model, config.d_expert, config.n_experts
        self.top_k = config.experts_per_token
        self.router = nn.Linear(D, E, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(E, width, D)) for _ in range(2))  # each expert's as (out, in)
        self.down = nn.Parameter(torch.empty(E, D, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Where training starts, the router aside: normal with standard deviation fan_in ** -0.5."""
        for stack in (self.gate, self.up, self.down):
            nn.init.normal_(stack, std=stack.shape[-1] ** -0.5)

    def forward(self, x: torch.Tensor, routes: "Routes | None" = None) -> torch.Tensor:
        """x: (B, T, D) -> (B, T, D). routes: takes the record of this execution and may set its experts."""
        flat = x.flatten(0, -2)
        logits = self.router(flat)
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
        ids = top(scores, self.top_k) if routes is None else routes.choose(self, scores)
        weights = mix(scores, ids).to(x.dtype)
        if routes is not None:
            routes.add(self, scores, ids, weights, x.shape[:-1])
        device = x.device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            matrices = self.gate, self.up, self.down
            return Mixture.apply(flat, weights, *arrange(ids, len(self.gate)), *matrices).view(x.shape)
        values = (flat, weights, self.gate, self.up, self.down)  # autocast does not see into a gradient that is written out
        flat, weights, *matrices = (value.to(torch.get_autocast_dtype(device)) for value in values)
        with torch.autocast(device, enabled=False):
            return Mixture.apply(flat, weights, *arrange(ids, len(self.gate)), *matrices).view(x.shape)


def top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k experts of highest score, highest first. scores: (N, E) -> (N, k)."""
    return scores.detach().topk(k, dim=-1).indices


def mix(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Scores at the ids over their sum. scores: (N, E), ids: (N, k) -> (N, k)."""
    chosen = scores.gather(1, ids)
    return chosen / chosen.sum(-1, keepdim=True)


def arrange(ids: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order, place, ends): order (M,) sorts the choices ids (N, k) by expert, place (M,) undoes it, and expert i's rows end
    before row ends[i] (E,)."""
    found, order = ids.flatten().sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=ids.device)
    return order, place, torch.searchsorted(found, torch.arange(n_experts, device=ids.device), right=True, out_int32=True)


def grouped(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """One matrix product for each expert. a (M, K) and b (E, K, O) -> (M, O); or a (K, M) and b (M, O) -> (E, K, O).

    torch's own has no float64 and wants rows that start at multiples of 16 bytes. Elsewhere (the tests' exact comparisons,
    models of odd widths) the experts come one after the other.
    """
    if a.is_meta:  # shapes alone
        return a.new_empty((len(a), b.shape[2]) if b.dim() == 3 else (len(ends), len(a), b.shape[1]))
    if all(_aligned(t) for t in (a, b)):
        return F.grouped_mm(a, b, offs=ends)
    last = ends.tolist()
    groups = list(zip([0, *last[:-1]], last, strict=True))
    if b.dim() == 3:
        return torch.cat([a[start:end] @ own for (start, end), own in zip(groups, b, strict=True)])
    return torch.stack([a[:, start:end] @ b[start:end] for start, end in groups])


def _aligned(t: torch.Tensor) -> bool:
    """Whether `torch.nn.functional.grouped_mm` takes this operand."""
    strides = (t.stride(i) * t.element_size() for i in range(t.dim()) if t.stride(i) != 1)
    return t.dtype != torch.float64 and all(s % 16 == 0 for s in strides)


class Mixture(torch.autograd.Function):
    """All experts on their tokens, and their weighted sum. x (N, D), weights (N, k), order, place (M,), ends (E,), gate and up
    (E, F, D), down (E, D, F) -> (N, D).

    A token takes its rows back by the inverse permutation, forwards and backwards: nothing is scattered. Rows and hidden
    values are made again rather than kept, and elementwise steps are in place: fresh memory costs more than they do.
    """

    @staticmethod
    def forward(ctx, x, weights, order, place, ends, gate, up, down):
        """Keeps both projections."""
        rows = x.index_select(0, order // weights.shape[1])
        g, u = (grouped(rows, matrix.transpose(1, 2), ends) for matrix in (gate, up))
        del rows
        out = grouped(F.silu(g).mul_(u), down.transpose(1, 2), ends)
        ctx.save_for_backward(x, weights, order, place, ends, gate, up, down, g, u)
        return F.embedding_bag(place.view_as(weights), out, per_sample_weights=weights, mode="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Gradients of the forward's arguments."""
        x, weights, order, place, ends, gate, up, down, g, u = ctx.saved_tensors
        wants_x, wants_weights, *_, wants_gate, wants_up, wants_down = ctx.needs_input_grad
        of_x = of_weights = of_gate = of_up = of_down = None
        token, share = order // weights.shape[1], weights.flatten()[order][:, None]
        silu = F.silu(g)
        hidden = silu * u
        of_out = grad.index_select(0, token)
        of_hidden = grouped(of_out, down, ends)  # without the weight, whose gradient is its product with hidden
        if wants_weights:
            of_weights = torch.bmm(of_hidden[:, None], hidden[:, :, None]).flatten()[place].view_as(weights)
        if wants_down:
            of_down = grouped(of_out.mul_(share).t(), hidden, ends)
        del of_out, hidden
        rows = x.index_select(0, token)
        of_u = silu.mul_(of_hidden.mul_(share))
        if wants_up:
            of_up = grouped(of_u.t(), rows, ends)
        of_g = torch.ops.aten.silu_backward.grad_input(of_hidden.mul_(u), g, grad_input=of_hidden)
        if wants_gate:
            of_gate = grouped(of_g.t(), rows, ends)
        if wants_x:
            of_rows = grouped(of_u, up, ends).add_(grouped(of_g, gate, ends))
            of_x = F.embedding_bag(place.view_as(weights), of_rows, mode="sum")
        return of_x, of_weights, None, None, None, of_gate, of_up, of_down


@dataclass(frozen=True, eq=False)
class Execution:
    """What one execution of one router chose."""

    module: int  # modules are numbered as they first appear in the pass
    time: int  # how often this module had been executed before
    scores: torch.Tensor  # (N, E) sigmoids, with their graph
    ids: torch.Tensor  # (N, k) experts used, in descending order of score
    weights: torch.Tensor  # (N, k) of those experts, with their graph
    shape: tuple[int, ...]  # (B, T)


@dataclass(eq=False)
class Routes:
    """What the routers chose in one pass, and what they are made to choose; a new one for every pass.

    reuse: which experts an `Experts` uses when it is executed again; what is executed once is untouched. "none": its own
    choice; "first": for each token those it chose at its first execution (the causal intervention of the axes paper);
    "random": k distinct experts drawn uniformly for each token, by (seed, number of the execution in the pass) alone (the
    control). In each case the weights are its own scores at these experts over their sum; that the intervention renormalises
    is this replication's reading, since the published code has none of it.

    executions: the record, in order. It holds what the pass has made anyway and copies nothing.

    Raises ValueError when reuse is none of these.
    """

    reuse: str = "none"
    seed: int = 0
    executions: list[Execution] = field(default_factory=list)

    def __post_init__(self):
        if self.reuse not in REUSE:
            raise ValueError(f"reuse is {self.reuse!r}: it must be one of {', '.join(REUSE)}")
        self._firsts: dict[Experts, Execution] = {}  # each module's first execution
        self._counts: Counter[Experts] = Counter()

    def choose(self, module: Experts, scores: torch.Tensor) -> torch.Tensor:
        """The experts (N, k) of this execution, in descending order of score. scores: (N, E).

        Raises ValueError when experts are to be used again for another number of tokens.
        """
        first = self._firsts.get(module)
        if self.reuse == "none" or first is None:
            return top(scores, module.top_k)
        if self.reuse == "first":
            ids = first.ids
            if len(ids) != len(scores):
                raise ValueError(
                    f"reuse is 'first' with {len(scores)} tokens after {len(ids)}: it must be one pass over the same tokens"
                )
        else:
            generator = torch.Generator().manual_seed(_mixed(self.seed, len(self.executions)))
            ids = torch.rand(scores.shape, generator=generator).topk(module.top_k, dim=-1).indices.to(scores.device)
        return ids.gather(1, scores.detach().gather(1, ids).argsort(dim=-1, descending=True, stable=True))

    def add(self, module: Experts, scores, ids, weights, shape) -> None:
        """Record an execution. scores: (N, E), ids, weights: (N, k), shape: (B, T)."""
        number = self._firsts[module].module if module in self._firsts else len(self._firsts)
        execution = Execution(number, self._counts[module], scores, ids, weights, tuple(shape))
        self._firsts.setdefault(module, execution)
        self._counts[module] += 1
        self.executions.append(execution)

    def balances(self) -> torch.Tensor:
        """`balance` of each execution, (X,)."""
        return torch.stack([balance(e.scores, e.ids) for e in self.executions])

    def balance(self) -> torch.Tensor:
        """Their mean, a scalar: what training adds to its loss, times a coefficient (1e-3 in the axes paper)."""
        return self.balances().mean()

    def repeated(self) -> dict[int, list[Execution]]:
        """The executions of each module that was executed more than once."""
        found: dict[int, list[Execution]] = {}
        for e in self.executions:
            found.setdefault(e.module, []).append(e)
        return {module: own for module, own in found.items() if len(own) > 1}


def _mixed(seed: int, number: int) -> int:
    """One seed from two, so that (0, 1) and (1, 0) draw differently."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0])


def shares(ids: torch.Tensor, n_experts: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The share of all selections that went to each expert. ids: (N, k) -> (E,)."""
    return torch.bincount(ids.flatten(), minlength=n_experts).to(dtype) / ids.numel()


def balance(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The load-balancing loss E sum_i f_i P_i of one execution, a scalar; 1 when either is uniform.

    P_i is the mean over tokens of expert i's share of all E sigmoids, f_i its share of the selections; the gradient is through
    P alone. The published code's "dot" loss. scores: (N, E), ids: (N, k).
    """
    P = scores.sum(-1).reciprocal() @ scores / len(scores)
    return scores.shape[-1] * (shares(ids, scores.shape[-1], P.dtype) @ P)


@torch.no_grad()
def load(routes: Routes) -> pd.DataFrame:
    """Expert load of every module at every of its executions: module, time, expert, share (of the selections)."""
    return pd.DataFrame(
        [
            dict(module=e.module, time=e.time, expert=i, share=share)
            for e in routes.executions
            for i, share in enumerate(shares(e.ids, e.scores.shape[-1]).tolist())
        ],
        columns=["module", "time", "expert", "share"],
    )


@torch.no_grad()
def mean_load(routes: Routes) -> pd.DataFrame:
    """`load` averaged over the modules that were executed more than once: time, expert, share. The load of each loop step."""
    frame = load(routes)
    frame = frame[frame["module"].isin(list(routes.repeated()))]
    return frame.groupby(["time", "expert"], as_index=False)["share"].mean()


@torch.no_grad()
def overlap(routes: Routes) -> pd.DataFrame:
    """For each module executed more than once and every two of its times, the share of a token's k experts that both chose,
    mean over tokens: module, time, other (the later), value. Independent uniform choices have k / E."""
    return pd.DataFrame(
        [
            dict(module=module, time=a.time, other=b.time, value=_common(a.ids, b.ids))
            for module, own in routes.repeated().items()
            for a, b in combinations(own, 2)
        ],
        columns=["module", "time", "other", "value"],
    )


def _common(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean over tokens of |a_n and b_n| / k. a, b: (N, k), each row without repetition."""
    return (a[:, :, None] == b[:, None, :]).sum().item() / a.numel()


@torch.no_grad()
def entropy(routes: Routes) -> pd.DataFrame:
    """Routing entropy of every execution in bits, at most log2 E: module, time, load_bits (of the experts' shares of the
    selections), token_bits (of a token's scores over their sum, mean over tokens)."""
    rows = []
    for e in routes.executions:
        tokens = _bits(e.scores / e.scores.sum(-1, keepdim=True)).mean()
        loads = _bits(shares(e.ids, e.scores.shape[-1]))
        rows.append(dict(module=e.module, time=e.time, load_bits=loads.item(), token_bits=tokens.item()))
    return pd.DataFrame(rows, columns=["module", "time", "load_bits", "token_bits"])


def _bits(p: torch.Tensor) -> torch.Tensor:
    """Entropy along the last axis, in bits."""
    return -torch.xlogy(p, p).sum(-1) / np.log(2)
