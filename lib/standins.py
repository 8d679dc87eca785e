"""Small models trained here in the released families' own styles, which stand in for weights that are not at hand.

Ouro's style: a full stack of sandwich layers, the norm at every loop boundary, the loss at every loop step weighted by an exit
gate. Huginn's style: prelude, core and coda with norms on the sums, the input concatenated to the state at every step, a state
that starts from noise drawn anew, a sampled loop count and truncated backpropagation. All tasks in one vocabulary.
"""

from lib.mixture import Mixture
from lib.tasks import Task
from lib.training import Recipe, Run, make_run, precision_on

OURO = {"block": "sandwich", "boundary": 1, "exit_gate": True}
HUGINN = {
    "block": "sandwich_sum",
    "injection": "concat",
    "state_init": "noise",
    "state_noise": "truncated",
    "state_std": 0.4**0.5,
    "readout_order": "norm_coda_norm",
}
# name -> its family and layers; the number is that of the looped layers
STYLES = {
    "ouro-1": ("ouro", OURO | {"core": 1}),
    "ouro-2": ("ouro", OURO | {"core": 2}),
    "huginn": ("huginn", HUGINN | {"prelude": 1, "core": 1, "coda": 1}),
}


def mixture(p: dict) -> Mixture:
    """The tasks at the notebook's parameters, in one vocabulary. Raises ValueError when a task is impossible."""
    inner = {"paragg": {"circuit_width": p["paragg_circuit_width"]}}
    return Mixture(tuple(Task(f, p[f"{f}_width"], p[f"{f}_depth"], **inner.get(f, {})) for f in p["tasks"]))


def run_of(p: dict, style: str, seed: int, lr: float | None = None) -> Run:
    """The run of one style and seed, at its own peak rate or at `lr`. Raises ValueError naming a bad value."""
    if style not in STYLES:
        raise ValueError(f"style is {style!r}: it must be one of {', '.join(STYLES)}")
    if len(p["lr"]) != len(p["styles"]):
        raise ValueError(f"lr has {len(p['lr'])} rates: it must have one for each of {', '.join(p['styles'])}")
    family, layers = STYLES[style]
    own = {"ouro": {"loss": "exit_weighted", "exit_entropy": p["exit_entropy"]}, "huginn": {"fresh_state": True}}
    own["huginn"] |= {"loop_sampling": "poisson_lognormal", "backprop": p["backprop"]}
    recipe = Recipe(
        steps=p["steps"],
        batch_size=p["batch_size"],
        lr=p["lr"][p["styles"].index(style)] if lr is None else lr,
        optimizer=p["optimizer"],
        warmup=p["warmup"],
        weight_decay=p["weight_decay"],
        precision=precision_on(p["device"]),
        **own[family],
    )
    shape = {key: p[key] for key in ("d_model", "n_heads", "d_ff")} | {"loops": p["r0"]}
    return make_run(mixture(p), recipe, seed, device=p["device"], **shape, **layers)
