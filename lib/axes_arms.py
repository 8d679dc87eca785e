"""The arms of the axes paper at the notebooks' parameters: one axis changed at a time, equal layers stored and executed.

P prelude, R recurrent, C coda layers, U updates: the sandwich executes P + U R + C layers, and the full stack loops its
P + R + C layers as often as gives the same number (axes paper, "Model Configurations").
"""

from lib import task_groups
from lib.config import LoopedConfig
from lib.training import Recipe, Run, make_run, precision_on

NOISE = {"state_init": "noise", "state_noise": "normal"}
WRITE = {"injection": "diagonal"}
HL = NOISE | WRITE
# arm -> its envelope and what differs from that envelope's plain form
ARMS = {
    "full": ("full", {}),
    "full_injected": ("full", WRITE | {"injection_source": "tokens"}),
    "sandwich": ("sandwich", {}),
    "sandwich_injected": ("sandwich", WRITE),
    "noise": ("sandwich", WRITE | NOISE),  # the complete Huginn design
    "shared_hl": ("sandwich", HL | {"state": "shared"}),
    "split_hl": ("sandwich", HL | {"state": "split"}),
    "split_hl_x2": ("sandwich", HL | {"state": "split", "repeats": 2}),
    "feedforward": ("stack", {}),  # as many layers as the others execute
    "feedforward_injected": ("sandwich", WRITE | {"unrolled": True}),
    "feedforward_stored": ("stored", {}),  # as many layers as the others store
}
# an arm with experts -> the arm that it is in all else
WITH_EXPERTS = {"full_moe": "full", "huginn_moe": "noise", "feedforward_moe": "feedforward"}
SHARES = (0.25, 0.5, 1.0)  # of the steps, after which a model is read


def envelopes(p: dict) -> dict[str, dict]:
    """Layer and loop counts of each envelope. Raises ValueError when the full stack cannot execute what the sandwich does."""
    P, R, C, U = (p[key] for key in ("prelude", "recurrent", "coda", "updates"))
    stored, executed = P + R + C, P + U * R + C
    if executed % stored:
        raise ValueError(
            f"updates is {U}: the sandwich executes {executed} layers, which must be a multiple of the {stored} it stores, so "
            "that the full stack can execute as many"
        )
    return {
        "full": {"prelude": 0, "core": stored, "coda": 0, "loops": executed // stored},
        "sandwich": {"prelude": P, "core": R, "coda": C, "loops": U},
        "stack": {"prelude": 0, "core": executed, "coda": 0, "loops": 1},
        "stored": {"prelude": 0, "core": stored, "coda": 0, "loops": 1},
    }


def model_of(p: dict, arm: str) -> dict:
    """LoopedConfig values of an arm. Raises ValueError naming an unknown arm or counts that do not match."""
    base = WITH_EXPERTS.get(arm, arm)
    if base not in ARMS:
        raise ValueError(f"arm is {arm!r}: it must be one of {', '.join((*ARMS, *WITH_EXPERTS))}")
    envelope, own = ARMS[base]
    values = {key: p[key] for key in ("d_model", "n_heads", "d_ff")} | envelopes(p)[envelope] | own
    if values.get("state_init") == "noise":
        values["state_std"] = p["d_model"] ** -0.5
    if values.get("state"):
        values |= _cycles(p, arm)
    if arm in WITH_EXPERTS:
        values |= {"feed_forward": "experts"} | {key: p[key] for key in ("n_experts", "experts_per_token", "d_expert")}
    return values


def _cycles(p: dict, arm: str) -> dict:
    """The cycles of an arm with H/L states. Raises ValueError where they do not make `updates`, or halves are not equal."""
    if lacking := sorted({"h_cycles", "l_cycles"} - p.keys()):
        raise ValueError(f"arm is {arm!r}: it takes {' and '.join(lacking)}, which are no parameters of this notebook")
    high, low = p["h_cycles"], p["l_cycles"]
    if p["updates"] != (made := high * (low + 1)):
        cycles = f"h_cycles is {high} and l_cycles {low}"
        raise ValueError(f"updates is {p['updates']}: it must be h_cycles * (l_cycles + 1), {made}, since {cycles}")
    if ARMS[arm][1]["state"] == "split" and p["recurrent"] % 2:
        raise ValueError(f"recurrent is {p['recurrent']} with arm {arm!r}: it must be even, a half for each state")
    return {"h_cycles": high, "l_cycles": low}


def rate_of(p: dict, arm: str) -> float:
    """The arm's peak rate: lr has one for each of arms, lr_moe for each of arms_moe. Raises ValueError when it has not."""
    names, rates = (p["arms_moe"], p["lr_moe"]) if arm in WITH_EXPERTS else (p["arms"], p["lr"])
    if len(names) != len(rates):
        key = "lr_moe" if arm in WITH_EXPERTS else "lr"
        raise ValueError(f"{key} has {len(rates)} rates: it must have one for each of {', '.join(names)}")
    return rates[names.index(arm)]


def run_of(p: dict, arm: str, seed: int, lr: float | None = None) -> Run:
    """The run of one arm and seed, at its own peak rate or at `lr`. Raises ValueError naming a bad value."""
    model = model_of(p, arm)
    recipe = Recipe(
        steps=p["steps"],
        batch_size=p["batch_size"],
        lr=rate_of(p, arm) if lr is None else lr,
        optimizer=p["optimizer"],
        warmup=p["warmup"],
        weight_decay=p["weight_decay"],
        precision=precision_on(p["device"]),
        fresh_state=model.get("state_init") == "noise",
        balance=p["balance"] if arm in WITH_EXPERTS else 0.0,
        snapshots=tuple(snapshots(p["steps"])),
    )
    return make_run(task_groups.make(p), recipe, seed, device=p["device"], **model)


def snapshots(steps: int) -> dict[int, float]:
    """Steps before the last after which a model is read -> the share of training they are."""
    return {max(1, round(share * steps)): share for share in SHARES[:-1]}


def config_of(p: dict, arm: str) -> LoopedConfig:
    """An arm's configuration. Raises ValueError as `run_of` does."""
    return run_of(p, arm, 0).config()
