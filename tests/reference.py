"""Independent references: numpy in float64, one row at a time, written from the papers' equations.

`forward` reads a model of this project, `published` an axes paper's checkpoint, by its own config and tensor names.
"""

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


def heads_attend(heads, H, G, theta, interleaved, allowed):
    """heads: (T, H + 2 G, E), queries, keys, values -> (T, H E)."""
    T, _, E = heads.shape
    angle = np.arange(T)[:, None] * theta ** (-2 * np.arange(E // 2) / E)
    out = []
    for h in range(H):
        g = h * G // H
        q = turned(heads[:, h], angle, interleaved)
        k = turned(heads[:, H + g], angle, interleaved)
        scores = np.where(allowed, q @ k.T / np.sqrt(E), -np.inf)
        p = np.exp(scores - scores.max(1, keepdims=True))
        out.append(p / p.sum(1, keepdims=True) @ heads[:, H + G + g])
    return np.concatenate(out, 1)


def attention(x, w, prefix, c, allowed):
    T, H, G = len(x), c.n_heads, c.n_kv_heads or c.n_heads
    E = c.head_dim or c.d_model // H
    qkv = x @ w[f"{prefix}.qkv.weight"].T
    if c.qk_bias:
        qkv[:, : (H + G) * E] += w[f"{prefix}.qk_bias"]
    heads = qkv.reshape(T, H + 2 * G, E)
    return heads_attend(heads, H, G, c.rope_theta, c.rope == "interleaved", allowed) @ w[f"{prefix}.o.weight"].T


def swiglu(x, gate, up, down):
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


def routed(x, router, experts, k, record=None):
    """Each token through its k best experts, one token after the other. experts: (gate, up, down) each."""
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        score = 1 / (1 + np.exp(-router @ row))
        best = sorted(range(len(experts)), key=lambda i: -score[i])[:k]
        for i in best:
            out[t] += score[i] / sum(score[j] for j in best) * swiglu(row, *experts[i])
        if record is not None:
            record.append(best)
    return out


def feed_forward(x, w, prefix, c):
    if c.feed_forward == "experts":
        experts = list(zip(*(w[f"{prefix}.{part}"] for part in ("gate", "up", "down")), strict=True))
        return routed(x, w[f"{prefix}.router.weight"], experts, c.experts_per_token)
    return swiglu(x, *np.split(w[f"{prefix}.gate_up.weight"], 2), w[f"{prefix}.down.weight"])


def block(x, w, prefix, c, allowed):
    branches = {
        "attention": lambda y: attention(y, w, f"{prefix}.attention", c, allowed),
        "feed_forward": lambda y: feed_forward(y, w, f"{prefix}.feed_forward", c),
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
    """Logits and raw states of one row, (T,) or (T, F) ids, from the definitions alone. H/L states: [H, L] side by side."""
    c = model.config
    w = {k: v.double().numpy() for k, v in model.state_dict().items()}
    T = len(ids)
    allowed = np.tril(np.ones((T, T), dtype=bool))
    if segments is not None:
        allowed &= segments[:, None] == segments[None]

    def stack(x, part, layers):
        for i in layers:
            x = block(x, w, f"{part}.{i}", c, allowed)
        return x

    def updated(z, t, layers):
        if t and period and t % period == 0:
            z = rms(z, between)
        z = inject(z, x if c.injection_source == "tokens" else e, w, c)
        for _ in range(c.repeats):
            z = stack(z, "core", layers)
        return z

    x = w["embed_tokens.weight"][ids]
    x = (x.sum(1) if ids.ndim == 2 else x) * c.embedding_scale
    e = stack(x, "prelude", range(c.prelude))
    z = {"input": e, "zeros": np.zeros_like(e)}.get(c.state_init) if z0 is None else z0
    between = w["norm.weight"] if c.shared_norm else w["boundary_norm.weight"]
    states = []
    high = e
    low_layers = high_layers = range(c.core)
    if c.state == "split":
        high_layers, low_layers = range(c.core // 2), range(c.core // 2, c.core)
    for t in range(loops):
        if c.state == "single":
            z = updated(z, t, range(t * c.core, (t + 1) * c.core) if c.unrolled else range(c.core))
            states.append(z)
            continue
        if (t + 1) % (c.l_cycles + 1) == 0:
            high = updated(high + z, t, high_layers)
        else:
            z = updated(z + high, t, low_layers)
        states.append(np.concatenate([high, z], 1))
    if c.state != "single":
        z = high
    normed = c.readout == "normalised"
    if normed and c.readout_order == "norm_coda_norm":
        z = rms(z, w["norm.weight"])
    z = stack(z, "coda", range(c.coda))
    return (rms(z, w["norm.weight"]) if normed else z) @ w["lm_head.weight"].T, states


def published(stored, m, ids, z0=None, record=None):
    """Logits and updated states of one row, ids (T,), of a checkpoint as published: its tensors and its `model` section.

    record: takes, for each expert layer executed, each token's experts.
    """
    w = {name: t.double().numpy() for name, t in stored.items()}
    D, H, G, eps = m["model_dim"], m["num_heads"], m["num_kv_heads"], m["rmsnorm_eps"]
    T, allowed = len(ids), np.tril(np.ones((len(ids), len(ids)), dtype=bool))

    def layer(x, i):
        at = f"layers.{i}"
        y = rms(x, 1 + w[f"{at}.attention.norm.weight"], eps)
        q, k, v = (y @ w[f"{at}.attention.w{part}.weight"].T for part in "qkv")
        heads = np.concatenate([part.reshape(T, -1, m["head_dim"]) for part in (q, k, v)], axis=1)
        x = x + heads_attend(heads, H, G, m["rope_base"], True, allowed) @ w[f"{at}.attention.wo.weight"].T
        if not m["num_experts"]:
            y = rms(x, 1 + w[f"{at}.nffn.norm.weight"], eps)
            return x + swiglu(y, *(w[f"{at}.nffn.fc{part}.weight"] for part in (1, 3, 2)))
        y, n = rms(x, 1 + w[f"{at}.moe.norm.weight"], eps), m["expert_inter_dim"]
        gate, up, down = (w[f"{at}.moe.experts.weight{part}"] for part in (1, 3, 2))
        cut = [(slice(e * n, (e + 1) * n), slice(e * D, (e + 1) * D)) for e in range(m["num_experts"])]
        experts = [(gate[wide], up[wide], down[back]) for wide, back in cut]
        if record is not None:
            record.append([])
        own = None if record is None else record[-1]
        return x + routed(y, w[f"{at}.moe.router.weight"], experts, m["num_activated_experts"], own)

    def layers(x, span):
        for i in span:
            x = layer(x, i)
        return x

    def write(s, e, module):
        dt = np.log1p(np.exp(w[f"{module}.dt_bias"]))
        return np.exp(-dt * np.exp(w[f"{module}.A_log"])) * s + dt * (e @ w[f"{module}.input_adapter.weight"].T)

    x, n, states = w["embed.weight"][ids], m["num_layers"], []
    if m["arch"] == "huginn":
        P, R = m["huginn_prelude_layers"], m["huginn_recurrent_layers"]
        e = layers(x, range(P))
        z0 = e if m["huginn_state_init"] == "input" else z0
        kind, R_H, R_L, times = m["huginn_hierarchical_state"], range(P, P + R), range(P, P + R), 1
        if kind == "split_hl":
            R_H, R_L = range(P, P + R // 2), range(P + R // 2, P + R)
            times = m.get("huginn_split_module_repeats", 1)

        def update(s, span):
            s = write(s, e, "input_injection") if m["huginn_input_injection"] == "diagonal" else s
            for _ in range(times):
                s = layers(s, span)
            states.append(s)
            return s

        if kind == "none":
            z = z0
            for _ in range(m["loop_times"]):
                z = update(z, R_H)
        else:
            z, low = e, z0
            for _ in range(m["huginn_hierarchical_h_cycles"]):
                for _ in range(m["huginn_hierarchical_l_cycles"]):
                    low = update(low + z, R_L)
                z = update(z + low, R_H)
        z = layers(z, range(P + R, n))
    else:
        places = [int(i) for i in (m.get("dense_prelude_input_layers") or "").split(",") if i]
        z, e = x, None
        for _ in range(m["loop_times"]):
            if m["loop_input_injection"] == "diagonal":
                z = write(z, x, "loop_input_injection_module")
            for i in range(n):
                if i in places:
                    z = write(z, e, "dense_prelude_input_injection_module")
                z = layer(z, i)
                e = z if i == m.get("dense_prelude_source_layer") else e
            states.append(z)
    return rms(z, 1 + w["output.final_norm.weight"], eps) @ w["output.output.weight"].T, states
