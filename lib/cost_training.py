"""What pre-training a looped model on text will take, from its configuration alone: FLOP, bytes on a GPU, and GPU hours.

As in `cost`, a multiplication and an addition are 2 FLOP, and norms, rotations and other elementwise steps are not counted. A
product's backward pass is two products of its size: gradients of inputs are always needed, since embeddings and norms learn.

Shapes: T tokens a row, D d_model, H heads, G key and value heads, E channels a head, F width of the feed-forward, V vocabulary.
"""

import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from lib import cost, released, results
from lib.boundary import Boundary
from lib.config import LoopedConfig
from lib.layers import INJECTIONS, Block
from lib.looped import build

# name -> (FLOP/s of dense bf16 products at their published peak, bytes of memory)
GPUS = {"H100": (989e12, 80 * 10**9), "H200": (989e12, 141 * 10**9), "A100": (312e12, 80 * 10**9)}
MFU = 0.4  # share of that peak which the model's own FLOP run at, recomputation not counted as work
FILLED = 0.9  # share of a GPU's memory that may be planned with: kernels' workspaces and fragments take the rest
MOST = 4096  # GPUs
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

AXES = "IFM/LoopedLM-P1-"
TOKENS = {"336b": 335_544_320_000, "500b": 500_002_979_840}  # of the axes paper's two endpoints
LENGTH = 8192  # tokens a row, the axes paper's
# how the other families train; how many tokens they took is not in the released files
OTHERS = {
    "ByteDance/Ouro-1.4B": {"length": 4096, "every_step_read": True},
    "ByteDance/Ouro-2.6B": {"length": 4096, "every_step_read": True},
    "tomg-group-umd/huginn-0125": {"length": 4096, "backprop": 8},
}
COUNTS = ("parameters", "active", "applied")
HEADER = ("recipe", "tokens", *COUNTS, "GFLOP/token", "FLOP", "GPUs", "memory a GPU", "hours", "days on 64")
# what --measure trains for a moment
SMALL = {"vocab_size": 1024, "d_model": 256, "n_heads": 4, "d_ff": 704, "prelude": 1, "core": 2, "coda": 1, "loops": 4}
SMALL |= {"injection": "diagonal", "state_init": "noise"}


@dataclass(frozen=True)
class Flop:
    """FLOP of one training token: forward, backward, and of layers run once more for the backward pass."""

    forward: float
    backward: float
    again: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.again


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: float32 weights, gradients and AdamW's two moments (this device's shard of each), what is gathered
    of the others' weights with its gradient, activations kept for the backward pass, and logits with their softmax."""

    weights: int
    gradients: int
    moments: int
    gathered: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Bytes held at once, at most; buffers that live within one operation left out."""
        return self.weights + self.gradients + self.moments + self.gathered + self.activations + self.logits

    def over(self, shards: int) -> "Memory":
        """The same with weights, gradients and moments split over so many devices."""
        return replace(self, **{key: -(-getattr(self, key) // shards) for key in ("weights", "gradients", "moments")})

    def sentence(self) -> str:
        """The parts in words."""
        return ", ".join(f"{key} {cost.size(value)}" for key, value in vars(self).items())


@dataclass(frozen=True)
class Budget:
    """A training run on a kind of GPU: its tokens and FLOP, the fewest GPUs (a power of two) whose memory holds it, what each
    then holds, and GPU hours."""

    tokens: int
    flop: float
    gpu: str
    gpus: int
    memory: Memory
    hours: float

    def days(self, gpus: int) -> float:
        """Days on so many GPUs, were none of them to wait for another."""
        return self.hours / gpus / 24

    def sentence(self) -> str:
        """The budget in words."""
        days = ", ".join(f"{self.days(n):,.3g} on {n}" for n in (8, 64, 256))
        held = f"{self.gpus} x {self.gpu} hold it at {cost.size(self.memory.total)} each"
        return f"{self.flop:.3g} FLOP, {self.hours:,.0f} {self.gpu} hours; {held}; days: {days}"


def reached(config: LoopedConfig, loops: int | None = None, backprop: int | None = None) -> tuple[int, bool]:
    """Loop steps that gradients flow through, and whether they reach the prelude.

    loops: steps executed, the trained count by default; backprop: gradients through the last so many alone. A low H/L state
    that is not read again goes back too, with gradients of zero. Raises ValueError for counts below 1.
    """
    loops, steps = _counts(config, loops, backprop)
    started = steps == loops and (config.state_init == "input" or config.state != "single")
    return steps, started or (config.injection != "none" and config.injection_source == "prelude")


def _counts(config: LoopedConfig, loops: int | None, backprop: int | None) -> tuple[int, int]:
    loops = config.loops if loops is None else loops
    backprop = loops if backprop is None else backprop
    for name, value in (("loops", loops), ("backprop", backprop)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    return loops, min(backprop, loops)


def _backward_layers(config: LoopedConfig, loops, backprop, every_step_read: bool) -> int:
    """Executions of a layer that gradients flow through."""
    steps, prelude = reached(config, loops, backprop)
    reads = _counts(config, loops, backprop)[0] if every_step_read else 1
    return config.prelude * prelude + steps * config.step_layers + reads * config.coda


def flop_per_token(
    config: LoopedConfig,
    length: int,
    loops: int | None = None,
    backprop: int | None = None,
    every_step_read: bool = False,
    recompute: bool = False,
    masked: bool = True,
) -> Flop:
    """FLOP of one training token in a row of `length` tokens, all of which are predicted.

    loops, backprop: as in `reached`. every_step_read: coda and head at every loop step (Ouro's loss) and not at the last alone.
    recompute: layers that gradients flow through run once more. masked: products with the tokens behind a token count too, as
    torch's counter has it; False: causal kernels, which leave them out. An expert counts where a token goes through it.
    """
    steps, prelude = reached(config, loops, backprop)
    loops, _ = _counts(config, loops, backprop)
    D, H, G, E = config.d_model, config.n_heads, config.kv_heads, config.head_width
    routed = config.experts_per_token * config.d_expert
    width = config.d_ff if config.feed_forward == "dense" else routed
    matrices = D * (H + 2 * G) * E + H * E * D + 3 * D * width + D * config.n_experts
    layer = 2 * matrices + 4 * (length if masked else (length + 1) / 2) * H * E
    injection = 2 * {"none": 0, "concat": 2 * D * D, "diagonal": D * D}[config.injection]
    reads = loops if every_step_read else 1
    read = reads * 2 * D * config.vocab_size + (loops * 2 * D if config.exit_gate and every_step_read else 0)
    back = _backward_layers(config, loops, backprop, every_step_read)
    ahead = config.prelude + loops * config.step_layers + reads * config.coda
    return Flop(
        forward=float(ahead * layer + loops * injection + read),
        # an expert's share gets its gradient from one more product
        backward=float(2 * (back * layer + steps * injection + read) + back * 2 * routed),
        again=float(back * layer) if recompute else 0.0,
    )


def memory(
    config: LoopedConfig,
    length: int,
    rows: int = 1,
    loops: int | None = None,
    backprop: int | None = None,
    every_step_read: bool = False,
    shards: int = 1,
    precision: str = "bfloat16",
    recompute: bool = False,
    fused_norms: bool = True,
    deferred: bool = False,
) -> Memory:
    """Bytes on one device that trains on `rows` rows of `length` tokens at once, with AdamW and FSDP2 over `shards` devices.

    Weights, gradients and moments are float32; what is gathered and what is kept is of `precision`. Gathered at once: one
    layer, with all its experts, and what is outside of layers, which stays (fully_shard on each layer, then on the model).
    recompute: a layer keeps its input, and one layer at a time is made again. fused_norms: a norm keeps its input alone, as on
    CUDA; on a CPU it keeps the normalised input too. Attention keeps no (T, T) weights. deferred: a step is several batches
    whose gradients are summed whole, in float32, and split once (FSDP2 without gradient sync between them). Raises ValueError
    for a precision that is not listed.
    """
    if precision not in BYTES:
        raise ValueError(f"precision is {precision!r}: it must be one of {', '.join(BYTES)}")
    each, D = BYTES[precision], config.d_model
    steps, prelude = reached(config, loops, backprop)
    reads = _counts(config, loops, backprop)[0] if every_step_read else 1
    block, _, outside = _sizes(config)
    count = config.stored_layers * block + outside
    norm = each * D * (1 if fused_norms else 2) + 4  # bytes a token: its input, 1 / rms in float32
    layer = _layer_kept(config, each, norm)
    layers = _backward_layers(config, loops, backprop, every_step_read)
    kept = layers * each * D + layer if recompute else layers * layer
    bounds = _boundaries(config, loops, steps)
    kept += steps * 2 * each * D * (config.injection != "none") + bounds * norm  # concat: both inputs; diagonal: state, W e
    kept += each * D * (config.injection == "diagonal")  # what is injected
    normed = config.readout == "normalised"
    kept += reads * (norm * normed * (2 if config.readout_order == "norm_coda_norm" else 1) + each * D)
    return Memory(
        weights=4 * count,
        gradients=4 * count,
        moments=8 * count,
        gathered=2 * each * (outside + block) + 4 * count * deferred,
        activations=rows * length * kept,
        # logits of one readout and their float32 gradient; every readout's float32 log-probabilities
        logits=rows * length * config.vocab_size * (each + 4 + 4 * reads),
    ).over(shards)


def counts(config: LoopedConfig) -> tuple[int, int, int]:
    """Resident, active and applied parameters as `cost` has them, from one layer: at once for a model of a hundred."""
    layer, injection, outside = _sizes(config)
    used = layer - (config.n_experts - config.experts_per_token) * 3 * config.d_model * config.d_expert
    active = config.stored_layers * used + outside
    again = (config.executed_layers - config.stored_layers) * used + (config.loops - 1) * injection
    return config.stored_layers * layer + outside, active, active + again


def _sizes(config: LoopedConfig) -> tuple[int, int, int]:
    """Parameters of one layer, of the injection, and of all that is outside of layers, the injection too."""
    D = config.d_model
    with torch.device("meta"):
        modules = Block(config), INJECTIONS[config.injection](config) if config.injection != "none" else torch.nn.Identity()
    layer, injection = (sum(p.numel() for p in m.parameters()) for m in modules)
    vectors = D * (1 if config.shared_norm else 2) + (D + 1) * config.exit_gate
    return layer, injection, injection + vectors + config.vocab_size * D * (1 if config.tie_word_embeddings else 2)


def _boundaries(config: LoopedConfig, loops: int | None, steps: int) -> int:
    """Boundary norms that act on the last `steps` loop steps' inputs."""
    loops, boundary = config.loops if loops is None else loops, Boundary(config.boundary)
    return sum(boundary.fires_before(t) for t in range(loops - steps, loops))


def _layer_kept(config: LoopedConfig, each: int, norm: int) -> int:
    """Bytes that a layer keeps for its backward pass, a token. norm: those of one norm."""
    D, H, G, E = config.d_model, config.n_heads, config.kv_heads, config.head_width
    kept = norm * (2 if config.block == "pre_norm" else 4) + each * 2 * D  # what two norms feed to matrices
    # as made (values lie in there), rotated, attention's output by head and by token, its log-sum
    kept += each * ((H + 2 * G) + (H + G) + 2 * H) * E + 4 * H
    if config.feed_forward == "dense":
        return kept + each * 4 * config.d_ff  # gate and up, silu(gate), their product
    k = config.experts_per_token  # gate and up; scores, their sum, those chosen; weights; three orders of int64
    return kept + each * 2 * k * config.d_expert + 4 * (config.n_experts + 1 + k) + each * k + 24 * k


def budget(
    config: LoopedConfig,
    tokens: int,
    length: int = LENGTH,
    gpu: str = "H100",
    mfu: float = MFU,
    rows: int = 1,
    loops: int | None = None,
    backprop: int | None = None,
    every_step_read: bool = False,
    recompute: bool = True,
    deferred: bool = False,
) -> Budget:
    """What training on so many tokens takes on one kind of GPU: hours = FLOP / (peak x mfu), attention counted as causal.

    mfu: assumed share of the dense bf16 peak; recomputation lowers it and is not counted as work. rows: of `length` tokens on a
    GPU at once; recompute, deferred: as in `memory`. Raises ValueError for a GPU that is not listed, and when no number of them
    up to `MOST` holds the run.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}: it must be one of {', '.join(GPUS)}")
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu is {mfu}: it must be above 0 and at most 1")
    peak, capacity = GPUS[gpu]
    how = {"loops": loops, "backprop": backprop, "every_step_read": every_step_read}
    flop = tokens * flop_per_token(config, length, masked=False, **how).total
    whole, gpus = memory(config, length, rows, recompute=recompute, deferred=deferred, **how), 1
    while whole.over(gpus).total > FILLED * capacity:
        gpus *= 2
        if gpus > MOST:
            least = replace(whole, weights=0, gradients=0, moments=0).total
            raise ValueError(
                f"{cost.size(least)} are not split over GPUs and {gpu} has {cost.size(capacity)}: "
                "train on shorter or fewer rows at once, with recompute, or on a larger GPU"
            )
    return Budget(tokens, flop, gpu, gpus, whole.over(gpus), flop / (peak * mfu) / 3600)


def rows(gpu: str = "H100") -> list[tuple[str, ...]]:
    """The cells of `HEADER` for every published recipe and budget of the axes paper, then Ouro and Huginn without one."""
    found = []
    for entry in released.catalogue():
        own = OTHERS.get(entry.id)
        if entry.plan is None or not (own is not None or entry.id.startswith(AXES)):
            continue
        config, how = entry.plan.config, dict(own or {})
        recipe, _, endpoint = entry.id.removeprefix(AXES).rpartition("-") if own is None else (entry.id, "", "")
        tokens = TOKENS.get(endpoint, 0)
        takes = budget(config, tokens, gpu=gpu, **how)
        each = flop_per_token(config, masked=False, **({"length": LENGTH} | how)).total
        ran = (f"{takes.flop:.2e}", f"{takes.hours:,.0f}", f"{takes.days(64):.1f}") if tokens else ("-",) * 3
        found.append(
            (
                recipe.split("/")[-1],
                f"{tokens / 1e9:.1f}B" if tokens else "-",
                *(f"{n / 1e9:.3f}B" for n in counts(config)),
                f"{each / 1e9:.1f}",
                ran[0],
                str(takes.gpus),
                cost.size(takes.memory.total),
                *ran[1:],
                "" if own is None else "other",
            )
        )
    found.sort(key=lambda cells: cells[-1])  # stable: those without a budget go last
    return [cells[:-1] for cells in found]


def assumptions(gpu: str = "H100") -> str:
    """What the table takes for granted, in one line."""
    (peak, capacity), shorter = GPUS[gpu], OTHERS["tomg-group-umd/huginn-0125"]["length"]
    return (
        f"Counted from the configurations, not measured. Assumed: {gpu} at {MFU:.0%} of its dense bf16 peak of "
        f"{peak / 1e12:.0f} TFLOP/s, recomputation not counted as work; causal attention without the masked half, rows of "
        f"{LENGTH:,} tokens (Ouro, Huginn-0125: {shorter:,}) taken as one document; one row a "
        "GPU at once, bf16 with float32 master weights, gradients and AdamW moments split by FSDP2 after every row, layers "
        f"recomputed, logits formed whole, at most {FILLED:.0%} of {capacity / 1e9:.0f} GB filled; GPUs: the fewest, a power "
        "of two, that hold it. "
        "Ouro reads every loop step, Huginn-0125 runs 32 and goes back through 8; their token budgets are not in the released "
        "files (-)."
    )


def table(gpu: str = "H100") -> list[str]:
    """Lines of what each published recipe and budget takes, and what was assumed."""
    cells = [_headed(gpu), *rows(gpu)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in cells
    ]
    return [*lines, "", assumptions(gpu)]


def markdown(gpu: str = "H100") -> str:
    """The same as a Markdown table with the assumptions beneath."""
    head, *body = _headed(gpu), *rows(gpu)
    ruler = ("---", *("---:" for _ in head[1:]))
    return "\n".join([*("| " + " | ".join(row) + " |" for row in (head, ruler, *body)), "", assumptions(gpu)])


def _headed(gpu: str) -> tuple[str, ...]:
    return tuple(f"{gpu} {name}" if name == "hours" else name for name in HEADER)


@dataclass(frozen=True)
class Rate:
    """Training as it ran: tokens/s, the FLOP/s that this count makes of them, those of a large matrix product, and where."""

    tokens: float
    flop: float
    product: float
    machine: str

    @property
    def share(self) -> float:
        """The share of the matrix product's rate."""
        return self.flop / self.product

    def sentence(self) -> str:
        """The measurement in words."""
        rate = f"{self.flop / 1e9:.3g} GFLOP/s, {self.share:.0%} of a large matrix product's {self.product / 1e9:.3g} GFLOP/s"
        return f"Measured on {self.machine}: {self.tokens:,.0f} tokens/s of a training step, {rate}."


def measured_rate(
    config: LoopedConfig | None = None, length: int = 256, rows: int = 4, device: str = "cpu", seconds: float = 3.0
) -> Rate:
    """The rate of real training steps (forward, backward, AdamW) on random tokens, for about `seconds` after one that is not
    counted: float32 on a CPU, bf16 autocast on CUDA. config: a small one by default."""
    config = LoopedConfig(**SMALL) if config is None else config
    model, cuda = build(config, 0).to(device).train(), torch.device(device).type == "cuda"
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> None:
        opt.zero_grad()
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=cuda):
            logits = model(ids).logits[:, :-1].float()
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        opt.step()
        if cuda:
            torch.cuda.synchronize()

    step()
    product, before = torch.bfloat16 if cuda else torch.float32, time.perf_counter()
    done = 0
    while not done or time.perf_counter() - before < seconds:
        step()
        done += 1
    tokens = done * rows * length / (time.perf_counter() - before)
    flop = tokens * flop_per_token(config, length, masked=False).total
    machine = results.hardware()
    name = torch.cuda.get_device_name(device) if cuda else f"{machine['processor']}, {torch.get_num_threads()} threads"
    return Rate(tokens, flop, cost.rate(device, product, width=8192 if cuda else 1024), name)
