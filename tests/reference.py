"""An independent reference of the model: numpy in float64, one row at a time, written from the papers' equations."""

import numpy as np


def rms(x, gain, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def turned(u, angle, interleaved):
    """One head's channels, rotated by angle (T, E / 2) as complex numbers."""
    half = u.shape[1] // 2
    z = u[:, ::2] + 1j * u[:, 1::2] if interleaved else u[:, :half] + 1j * u[:, half:]
    z = z * np.exp(1j * angle)
    out = np.empty_like(u)
    if interleaved:
        out[:, ::2], out[:, 1::2] = z.real, z.imag
    else:
        out[:, :half], out[:, half:] = z.real, z.imag
    return out


def attention(x, w, prefix, c, allowed):
    T, H, G = len(x), c.n_heads, c.n_kv_heads or c.n_heads
    E = c.head_dim or c.d_model // H
    qkv = x @ w[f"{prefix}.qkv.weight"].T
    if c.qk_bias:
        qkv[:, : (H + G) * E] += w[f"{prefix}.qk_bias"]
    heads = qkv.reshape(T, H + 2 * G, E)
    angle = np.arange(T)[:, None] * c.rope_theta ** (-2 * np.arange(E // 2) / E)
    out = []
    for h in range(H):
        g = h * G // H
        q = turned(heads[:, h], angle, c.rope == "interleaved")
        k = turned(heads[:, H + g], angle, c.rope == "interleaved")
        scores = np.where(allowed, q @ k.T / np.sqrt(E), -np.inf)
        p = np.exp(scores - scores.max(1, keepdims=True))
        out.append(p / p.sum(1, keepdims=True) @ heads[:, H + G + g])
    return np.concatenate(out, 1) @ w[f"{prefix}.o.weight"].T


def feed_forward(x, w, prefix):
    gate, up = np.split(x @ w[f"{prefix}.gate_up.weight"].T, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up @ w[f"{prefix}.down.weight"].T


def block(x, w, prefix, c, allowed):
    branches = {
        "attention": lambda y: attention(y, w, f"{prefix}.attention", c, allowed),
        "feed_forward": lambda y: feed_forward(y, w, f"{prefix}.feed_forward"),
    }
    for name, branch in branches.items():
        y = branch(rms(x, w[f"{prefix}.{name}_norm.weight"]))
        if c.block == "sandwich":
            y = rms(y, w[f"{prefix}.{name}_branch_norm.weight"])
        x = x + y
        if c.block == "sandwich_sum":
            x = rms(x, w[f"{prefix}.{name}_sum_norm.weight"])
    return x


def inject(z, e, w, c):
    if c.injection == "concat":
        bias = w["injection.adapter.bias"] if c.injection_bias else 0
        return np.concatenate([z, e], 1) @ w["injection.adapter.weight"].T + bias
    if c.injection == "diagonal":
        dt = np.log1p(np.exp(w["injection.dt_bias"]))
        return np.exp(-dt * np.exp(w["injection.A_log"])) * z + dt * (e @ w["injection.adapter.weight"].T)
    return z


def forward(model, ids, loops, period, z0=None, segments=None):
    """Logits and raw states of one row, (T,) or (T, F) ids, from the definitions alone."""
    c = model.config
    w = {k: v.double().numpy() for k, v in model.state_dict().items()}
    T = len(ids)
    allowed = np.tril(np.ones((T, T), dtype=bool))
    if segments is not None:
        allowed &= segments[:, None] == segments[None]

    def stack(x, part, n):
        for i in range(n):
            x = block(x, w, f"{part}.{i}", c, allowed)
        return x

    x = w["embed_tokens.weight"][ids]
    x = (x.sum(1) if ids.ndim == 2 else x) * c.embedding_scale
    e = stack(x, "prelude", c.prelude)
    z = {"input": e, "zeros": np.zeros_like(e)}.get(c.state_init) if z0 is None else z0
    between = w["norm.weight"] if c.shared_norm else w["boundary_norm.weight"]
    states = []
    for t in range(loops):
        if t and period and t % period == 0:
            z = rms(z, between)
        z = inject(z, x if c.injection_source == "tokens" else e, w, c)
        z = stack(z, "core", c.core)
        states.append(z)
    normed = c.readout == "normalised"
    if normed and c.readout_order == "norm_coda_norm":
        z = rms(z, w["norm.weight"])
    z = stack(z, "coda", c.coda)
    return (rms(z, w["norm.weight"]) if normed else z) @ w["lm_head.weight"].T, states
