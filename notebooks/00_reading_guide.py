# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading guide: what a looped model is
#
# ![State norm, readout entropy and logit gap of one answer at every loop step, one line a model: without the boundary norm the
# state grows and the answer stays sharp, with it the state keeps its length and the answer dissolves beyond the trained loop
# count](../outputs/laptop/00_reading_guide/one_answer.png)
#
# *Laptop run: one answer as it forms, read after every loop step. The dashed line is where both models were trained.*
# Words: [glossary](00_reading_guide.ipynb#Glossary).
#
# A looped (depth-recurrent) language model applies one stack of layers again and again. Depth becomes a number that can be
# chosen when the model is run: K loop steps, whatever the r0 it was trained with. This lesson takes 30 to 45 minutes and asks
# for transformers and a little torch. It builds a looped model by hand, trains it within seconds on a puzzle that can be solved
# by eye, and then takes its parts away one by one: the injection, the norm at the loop's boundary, the trained loop count, the
# readout. Three exercises check themselves. A glossary closes it.
#
# **Claim it prepares** (contract paper, section 4.3): the state of a model trained without the boundary norm grows by a factor
# of 4.84 over the loop counts 1 to 32, with the norm by 1.45, and it is the growing one that keeps its accuracy. This guide
# judges nothing: its rule is only that every number below is finite and the loop by hand equals the model's own, bit for bit.
#
# **One value to change.** Below, set `r0` from 4 to 2 and run all cells. The models by hand are then trained with two loop steps
# on rings whose light reaches two cells. The dashed lines of sections 1 to 6 move from K = 4 to K = 2, and with them the loop count
# at which the rings of the trained reach are first solved. It takes under a minute. (The words below describe r0 = 4.)
#
# Under a minute at the smoke scale shown in `notebooks/`; the same guide with two laptop models, some two minutes where they
# are not trained yet, is [here](../outputs/laptop/00_reading_guide/notebook.ipynb).

# %% tags=["parameters"]
scale: str = "smoke"  # whose models to draw in section 8: smoke, laptop, overnight or paper
instance: int = 0  # which test instance to follow there
r0: int = 4  # loop steps that the models by hand are trained with, 2 to 8

# %%
import math

import altair as alt
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import logging

from lib import experiment, foreign, instruments, params, paths, plots, results

chosen = params.of(globals())
out = results.begin("00_reading_guide", scale)
plots.setup()

# %%
from lib.boundary import never
from lib.config import LoopedConfig
from lib.experiment import ARMS, Job
from lib.looped import build

torch.set_num_threads(1)  # the same sums everywhere
logging.set_verbosity_error()  # nothing about faster kernels that are not installed


def styled(chart):
    """A chart of this page in the fonts of the others."""
    chart = chart.configure_axis(labelFontSize=12, titleFontSize=13, titleFontWeight="normal", gridOpacity=0.4)
    chart = chart.configure_legend(labelFontSize=12, titleFontSize=13, titleFontWeight="normal", orient="top", titleLimit=300)
    return chart.configure_title(fontSize=14, anchor="start")


# %% [markdown]
# ## 1. A looped model by hand
#
# ### The puzzle
#
# Twelve cells in a ring. One holds a lamp, some hold a wall, the rest is floor. Light runs both ways from the lamp until it meets
# a wall. The model says of every floor cell whether it is dark or lit. Walls are letters of many kinds, and the model repeats
# them (and the lamp) as they are: so it has a vocabulary of 32 tokens, of which only two, *dark* and *lit*, are answers. These
# two are the answer **alphabet**.

# %%
CELLS, V = 12, 32
FLOOR, LAMP, DARK, LIT, LETTERS = 0, 1, 2, 3, 4  # tokens; from LETTERS on they are walls


def light(ids):
    """How many cells each floor cell is from the lamp, along the floor; CELLS or more where no light comes."""
    far = torch.where(ids == LAMP, 0, CELLS)
    for _ in range(CELLS):
        near = torch.minimum(far.roll(1, 1), far.roll(-1, 1)) + 1
        far = torch.where(ids == FLOOR, torch.minimum(far, near), far)
    return far


# %%
def rings(n, seed):
    """n rings: tokens and answers, (n, CELLS) each, and the distance of each ring's farthest lit cell, (n,)."""
    g = torch.Generator().manual_seed(seed)
    wall = torch.rand(n, CELLS, generator=g) < 0.25
    ids = torch.where(wall, torch.randint(LETTERS, V, (n, CELLS), generator=g), FLOOR)
    ids[:, 0] = LAMP
    far = light(ids)
    answer = torch.where(ids == FLOOR, torch.where(far < CELLS, LIT, DARK), ids)
    return ids, answer, torch.where(far < CELLS, far, 0).amax(1)


ids, answer, far = rings(2, seed=3)
SIGNS = ["_", "*", "dark", "LIT", *"abcdefghijklmnopqrstuvwxyzAB"]
pd.DataFrame([[SIGNS[t] for t in row] for row in (*ids, *answer)], index=["ring 0", "ring 1", "answer 0", "answer 1"])

# %% [markdown]
# ### The model
#
# Here is all of it. A cell's state z has 32 channels. One **loop step** looks at a cell and its two neighbours and adds what a
# small network makes of them; an attention layer would do, and these lines keep in sight that *one step carries light by one
# cell*. The layers of the step are the **core**. They are stored once and used K times.


# %%
class Loop(nn.Module):
    """Twenty lines with the next cell: tokens in, a state that is changed K times, logits out."""

    def __init__(self, inject=True, every_step=False, D=32):
        super().__init__()
        self.inject, self.every_step = inject, every_step
        self.embed = nn.Embedding(V, D)
        self.core = nn.Sequential(nn.RMSNorm(3 * D), nn.Linear(3 * D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.norm = nn.RMSNorm(D)
        self.head = nn.Linear(D, V, bias=False)

    def step(self, z, e):
        x = z + e if self.inject else z
        return x + self.core(torch.cat((x.roll(1, 1), x, x.roll(-1, 1)), -1))


# %%
def states(m, ids, K, every_step):
    """The raw states z_1 .. z_K, (n, CELLS, D) each."""
    e = z = m.embed(ids)
    for t in range(K):
        z = m.step(m.norm(z) if every_step and t else z, e)
        yield z


def readout(m, z):
    """Logits of a raw state, (n, CELLS, V): always through the norm."""
    return m.head(m.norm(z))


# %% [markdown]
# ### Training
#
# The loss is read after r0 loop steps, nowhere else, and only on rings whose light reaches at most r0 cells: in r0 steps no
# more can be known.


# %%
def trained(r0, seed, steps=150, **design):
    torch.manual_seed(seed)
    m = Loop(**design)
    adam = torch.optim.AdamW(m.parameters(), weight_decay=0.0, fused=True)
    ids, answer, far = rings(8000, seed=1)
    ids, answer = ids[far <= r0], answer[far <= r0]
    for s in range(steps):
        adam.param_groups[0]["lr"] = 8e-3 * min(1, (s + 1) / 20) * (1 - s / steps)
        rows = torch.randint(len(ids), (16,))
        *_, z = states(m, ids[rows], r0, m.every_step)
        adam.zero_grad()
        F.cross_entropy(readout(m, z).flatten(0, 1), answer[rows].flatten()).backward()
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        adam.step()
    return m


# %% [markdown]
# Four designs, two seeds each: with and without *injection* (section 3), with and without a norm at *every step* (section 4).

# %%
made = {}
for inject in (True, False):
    for arm, every_step in (("no_norm", False), ("with_norm", True)):
        for seed in (0, 1):
            made[inject, arm, seed] = trained(r0, seed, inject=inject, every_step=every_step)

# %% [markdown]
# ### Light, step by step
#
# A ring that no model was trained on: its light reaches further than r0 cells. The readout is asked after every loop step, though
# it was trained after step r0 alone.

# %%
test = rings(256, seed=2)
row = int((test[2] == min(r0 + 2, 10)).nonzero()[0])
with torch.no_grad():
    m = made[True, "with_norm", 0]
    steps = list(states(m, test[0][[row]], 2 * r0, m.every_step))
    lit = torch.stack([readout(m, z).softmax(-1)[0, :, LIT] for z in steps])
cells = [(K + 1, c + 1, SIGNS[test[0][row, c]], float(lit[K, c])) for K in range(2 * r0) for c in range(CELLS)]
frame = pd.DataFrame(cells, columns=["K", "cell", "token", "lit"]).replace({"token": {"_": "", "*": "lamp"}})

# %%
axes = {"x": alt.X("cell:O", title="cell of the ring", axis=alt.Axis(labelAngle=0)), "y": alt.Y("K:O", title="loop step K")}
colour = alt.Color("lit:Q", title="probability of 'lit'", scale=alt.Scale(scheme="viridis", domain=[0, 1]))
floor = alt.Chart(frame[frame["token"] == ""]).mark_rect(stroke="white").encode(**axes, color=colour)
names = alt.Chart(frame[frame["token"] != ""]).mark_text(fontSize=plots.FONT).encode(**axes, text="token:N")
trained_at = alt.Chart(frame[(frame["K"] == r0) & (frame["cell"] == 1)]).mark_rule(strokeDash=[5, 4], yOffset=13)
line = trained_at.encode(y=axes["y"])
out.chart(styled((floor + names + line).properties(width=430, height=26 * 2 * r0)), "light")

# %% [markdown]
# The light leaves the lamp and moves on by one cell a step, both ways round, until it meets a letter. The dashed line is the
# trained loop count: below it the model does what it was never trained to do. That is the promise of a looped model: *depth is
# compute, and compute is chosen when the model is run*. The rest of this lesson asks when the promise is kept.
#
# ### What is measured
#
# Four numbers at every loop count K, over the floor cells of the test rings: the share of rings with every floor cell right
# (*solved*); the share of cells answered inside the alphabet, dark or lit (*inside*); the entropy of the readout in bits; the
# L2 norm of the raw state.


# %%
@torch.no_grad()
def measured(m, z, ids, answer):
    floor, p = ids == FLOOR, readout(m, z).softmax(-1)
    said = p.argmax(-1)
    solved = ((said == answer) | ~floor).all(1)
    inside = ((said == DARK) | (said == LIT))[floor]
    bits = torch.special.entr(p[floor]).sum(-1) / math.log(2)
    return [float(v.float().mean()) for v in (solved, inside, bits, z[floor].norm(dim=-1))]


# %% tags=["nbval-ignore-output"]
def readings(models, where, K_max=8 * r0, swap=False):
    """A row a model and loop count, K = 1, 2, 4 .. and r0; `where` picks test rings; swap: run with the other boundary."""
    rows, (ids, answer) = [], (test[0][where], test[1][where])
    for (arm, seed), m in models.items():
        for K, z in enumerate(states(m, ids, K_max, m.every_step != swap), 1):
            if K & (K - 1) == 0 or K == r0:
                rows.append((arm, seed, K, *measured(m, z.detach(), ids, answer)))
    return pd.DataFrame(rows, columns=["arm", "seed", "K", "solved", "inside", "bits", "norm"])


near, beyond = test[2] <= r0, test[2] > r0
kept = {"trained reach": near, "farther than trained": beyond}
both = {("injection and boundary norm", seed): made[True, "with_norm", seed] for seed in (0, 1)}
readings(both, near).query("K <= @r0").round(2)

# %% [markdown]
# ## 2. Prelude, core, coda
#
# Our loop has embedding, core and readout. Published models put layers around the core: the **prelude** runs once before the
# loop and turns tokens into e; the **coda** runs once after it, before the head. Ouro loops its whole stack, (0, N, 0) layers;
# Huginn is a sandwich, (P, N, C). The library's `LoopedConfig` says it in those three numbers. Count the calls of each layer in
# one pass at K = 2 and at K = 5.

# %%
styles = {
    "Ouro's style": {"core": 2, "block": "sandwich", "boundary": 1},
    "Huginn's style": {"prelude": 1, "core": 2, "coda": 1, "block": "sandwich_sum", "readout_order": "norm_coda_norm"},
}
own = {style: build(LoopedConfig(vocab_size=V, **values), seed=0) for style, values in styles.items()}
rows = []
for style, m in own.items():
    calls = instruments.module_calls(m, (2, 5), lambda m, loops: m(test[0][:1], loops=loops))
    for layer in ("prelude.0", "core.0", "core.1", "coda.0"):
        rows += [(style, layer, f"K = {K}", n) for K, n in zip((2, 5), calls.get(layer, ()), strict=False)]
frame = pd.DataFrame(rows, columns=["style", "layer", "K", "calls"])

# %%
order = ["prelude.0", "core.0", "core.1", "coda.0"]
dots = {
    "x": alt.X("calls:Q", title="calls in one pass", scale=alt.Scale(domain=[0, 5.5]), axis=alt.Axis(values=list(range(6)))),
    "y": alt.Y("layer:N", title=None, sort=order, scale=alt.Scale(domain=order)),
    "color": alt.Color("K:N", title=None, scale=alt.Scale(range=list(plots.COLOURS[:2]))),
    "shape": alt.Shape("K:N", title=None, scale=alt.Scale(range=list(plots.SHAPES[:2]))),
}
panels = []
for style, part in frame.groupby("style", sort=False):
    base = alt.Chart(part).mark_point(filled=True, size=110, opacity=1).encode(**dots)
    panels.append(base.properties(width=280, height=110, title=style))
out.chart(styled(alt.hconcat(*panels)), "anatomy")

# %% [markdown]
# Layers of the core are called K times; prelude and coda once, whatever K is (where a style has no such layer its row is
# empty). Parameters count stored layers, compute counts executed ones: that is why a fair comparison says which of the two it
# holds equal.
#
# Four verbs are all there is to the library's model too: `embed` the tokens (through the prelude), `init_state`, `step` as often
# as wanted, and `readout`. The loop below is the whole model.

# %%
p = params.load("4_3_scratch_training", scale)
run = experiment.arm_run(p, "circuit", "no_norm", seed=0)
model = build(run.config(), seed=0)
circuits = torch.as_tensor(experiment.strata(run.task, 64)[run.task.max_depth].ids)
with torch.no_grad():
    e = model.embed(circuits)
    z = model.init_state(e)
    for t in range(4):
        z = model.step(z, e, t, never)
    logits = model.readout(z)
    same = torch.equal(logits, model(circuits, loops=4, boundary=never).logits)
print("by hand and forward(loops=4) bitwise equal:", same)

# %% [markdown]
# ## 3. Injection: what is lost without it
#
# With **injection** every step gets e again, here by adding it: `x = z + e`. Without it the state alone must carry what the ring
# looks like. Ouro injects nothing and starts from the input; Huginn injects, and must, since its state starts from noise. Both
# arms below start from the input and have no boundary norm.

# %%
arms = {(("no injection", "injection")[i], seed): m for (i, arm, seed), m in made.items() if arm == "no_norm"}
frame = pd.concat([readings(arms, where).assign(task=name) for name, where in kept.items()], ignore_index=True)
frame["value"] = frame["solved"]
out.chart(plots.against_loops(frame, "rings solved (share)", r0), "injection")

# %% [markdown]
# Left: rings as they were trained on. Both arms solve them at the dashed line. Beyond it the arm without injection forgets what
# it was asked: walls fade from a state that nothing refreshes. Right: rings that need more steps than were ever trained; the arm
# with injection goes on to solve many of them at loop counts that it never saw. Points are seeds, the band is their interval,
# and two seeds are a demonstration, not a test: [dense_axes](dense_axes.ipynb) asks the question with eight.

# %% [markdown]
# ## 4. Two places for one norm
#
# The readout normalises the state before the head reads it. **Ouro** also normalises it at the end of every loop step, with the
# same module; **Huginn** does it once a pass, in the readout. The place between two steps is the **boundary**, and a norm there
# is the boundary norm. In our loop it is one line: `m.norm(z) if every_step and t else z`. (The state drawn is the raw one, as a
# step returns it, before any norm.)

# %%
parts = []
for inject, name in ((True, "with injection"), (False, "without injection")):
    arms = {(arm, seed): m for (i, arm, seed), m in made.items() if i == inject}
    parts.append(readings(arms, near).assign(task=name))
by_norm = pd.concat(parts, ignore_index=True)
grown = by_norm.assign(value=by_norm["norm"])
out.chart(plots.against_loops(grown, "L2 norm of the raw state", r0, log_y=True), "state_norm")

# %% [markdown]
# Without the boundary norm the state grows, beyond the budget about in proportion to K: every step adds, nothing takes away. With
# it the state keeps its length. Neither is a fault by itself. A growing state is moved by an ever smaller *relative* amount, and the head
# does not see its length, since the readout normalises.
#
# Instrumentation tells the two places apart without reading any code: count every norm's calls at two loop counts (2 and 5 here).
# A count that grows acts inside the loop: within one of its layers, or at its boundary, beside them. Below, our model in the two
# styles, and six looped classes that the installed transformers library ships, each small and random.

# %%
cases = {style: (m, lambda m, loops: m(test[0][:1], loops=loops)) for style, m in own.items()}
cases |= {name: (foreign.tiny(name), foreign.run) for name in foreign.CLASSES}
found = {name: instruments.norms(m, (2, 5), how) for name, (m, how) in cases.items()}
norms = pd.concat(found, names=["model"]).reset_index("model")
out.chart(plots.placements(norms, (2, 5)), "norm_placement")

# %% [markdown]
# The number beside a mark is how many norm modules are there. At 0 the loop count does not matter: those norms stand before or
# after the loop, Huginn's final norm among them (called twice whatever the loop count). Ouro's final norm gains one call with
# every loop step. By name, those at a boundary:

# %%
at_boundary = norms[norms["acts"] == instruments.BOUNDARY]
at_boundary[["model", "norm", "kind", "calls"]].reset_index(drop=True)

# %% [markdown]
# ## 5. Trained budget and overshoot
#
# r0, the loop count of training, is the **trained budget**. K / r0 is the **overshoot**. Two models with different budgets that
# run at the same K are not in the same place: the one with the smaller budget is further from home. Below, the design without
# injection and with the norm, trained at r0 and at half of it, on rings that both can solve; left against K, right against
# overshoot. Lines are seeds.

# %%
half = max(1, r0 // 2)
lines = {(f"trained at {r0}", seed): made[False, "with_norm", seed] for seed in (0, 1)}
lines |= {(f"trained at {half}", seed): trained(half, seed, inject=False, every_step=True) for seed in (0, 1)}
frame = readings(lines, test[2] <= half)
frame["overshoot"] = frame["K"] / frame["arm"].map({f"trained at {r0}": r0, f"trained at {half}": half})

# %%
budgets = list(dict.fromkeys(frame["arm"]))
colour = alt.Color("arm:N", title=None, scale=alt.Scale(domain=budgets, range=list(plots.COLOURS[:2])))
shape = alt.Shape("arm:N", title=None, scale=alt.Scale(domain=budgets, range=list(plots.SHAPES[:2])))
y = alt.Y("solved:Q", title="rings solved (share)", scale=alt.Scale(domain=[0, 1.05], nice=False))
panels = []
for column, title in (("K", "loop count K"), ("overshoot", "overshoot K / r0")):
    ticks = alt.Axis(values=sorted(set(frame[column])))
    x = alt.X(f"{column}:Q", title=title, scale=alt.Scale(type="log", base=2, nice=False, padding=15), axis=ticks)
    base = alt.Chart(frame).encode(x=x, y=y, color=colour)
    panel = base.mark_line().encode(detail="seed:N") + base.mark_point(size=50).encode(shape=shape)
    panels.append(panel.properties(width=330, height=230))
out.chart(styled(alt.hconcat(*panels)), "overshoot")

# %% [markdown]
# At equal K the two budgets look like two kinds of model. Over overshoot the curves lie much closer: most of what differed was
# the distance from home. [4.5](4_5_overshoot.ipynb) makes this its subject.

# %% [markdown]
# ## 6. The readout, and how it fails
#
# A **readout** turns a state into logits: norm, then head (behind a coda, where there is one). It was fitted to the states that
# the loop produced in training, and to nothing else. The contract paper calls the fit between the two a **contract**: a readout
# may be used with the loop it was trained on. More loop steps, or a norm put in or taken out, are another loop.
#
# Accuracy alone does not say how a readout fails. Two more measures do: the share of answers inside the alphabet, and the
# entropy. Below, the arms without injection, over the rings of the trained reach.

# %%
alone = by_norm[by_norm["task"] == "without injection"]
shares = {"solved": "rings solved (share)", "inside": "answers inside the alphabet (share)"}
frame = alone.melt(["arm", "seed", "K"], list(shares), var_name="measure")
out.chart(plots.against_loops(frame, shares, r0, panel="measure"), "readout_shares")

# %%
frame = alone.assign(value=alone["bits"], measure=f"uniform over {V} tokens: {math.log2(V):.0f} bits")
out.chart(plots.against_loops(frame, "readout entropy (bits)", r0, panel="measure", top=None, width=430), "readout_entropy")

# %% [markdown]
# Beyond the budget the models do more than confuse dark with lit: they answer with letters, or with the lamp. This is
# **format collapse**. A model that guessed *inside* the format would solve few rings too, but its share inside the alphabet
# would stay 1 and its entropy would be one bit at most. Above one bit a readout is undecided between more than two tokens.
# Where the entropy falls again while the share stays low, it is sure of a token that is no answer.
#
# Now break the contract in the other way: same weights, same K = r0, but the boundary norm taken away from the arm that was
# trained with it, or added to the arm that was trained without.

# %%
parts = []
for inject, name in ((True, "with injection"), (False, "without injection")):
    arms = {(arm, seed): m for (i, arm, seed), m in made.items() if i == inject}
    for swap, how in ((False, "own boundary"), (True, "other boundary")):
        parts.append(readings(arms, near, r0, swap).assign(task=name, run=how))
swapped = pd.concat(parts, ignore_index=True).query("K == @r0")
swapped["value"] = swapped["solved"]
out.chart(plots.swap(swapped, "rings solved at the trained loop count (share)"), "contract")

# %% [markdown]
# Nothing was retrained, and the loop count is the trained one: what changed is only which loop feeds the readout. The fall is not
# the same in both directions; the paper's [4.1](4_1_asymmetry.ipynb) is about that. Which arm does better far beyond the budget
# is another question, and this toy is no witness in it: [4.3](4_3_scratch_training.ipynb) asks it with eight seeds. In numbers:

# %% tags=["nbval-ignore-output"]
swapped.pivot_table(index=["task", "arm"], columns="run", values="solved")[["own boundary", "other boundary"]].round(2)

# %% [markdown]
# ## 7. Three exercises
#
# Put your answer in place of `None` and run the cell. It says whether it is right, and if not, where to look.
#
# **Exercise 1.** A ring's farthest lit cell is 3 cells from the lamp. What is the smallest number of loop steps after which a
# model like ours can have that ring right?


# %%
def check_reach(steps):
    if steps is None:
        return "Not answered yet: put a number of loop steps in place of None."
    if steps == 3:
        return "Right: one step carries light by one cell, so three cells take three steps, however well the model was trained."
    if steps > 3:
        return "Not yet: that many are enough, and fewer would do. Look at the first figure: how far does the light get in one step?"
    return "Not yet: after so few steps no information about the lamp has reached that cell. Which cells does one step look at?"


# %%
steps = None  # your answer, a whole number
print(check_reach(steps))

# %% [markdown]
# **Exercise 2.** Model A was trained at r0 = 8 and is run at K = 32. Model B was trained at r0 = 2. At which K does B run at the
# same overshoot as A?


# %%
def check_overshoot(K):
    if K is None:
        return "Not answered yet: put a loop count in place of None."
    if K == 8:
        return (
            "Right: 32 / 8 and 8 / 2 are both an overshoot of 4. If their cores have 1 and 4 layers, that is equal compute too."
        )
    told = f"Not yet: at K = {K} model B's overshoot is {K / 2:g}, and A's is 32 / 8 = 4."
    return f"{told} The same K is not the same overshoot." if K == 32 else f"{told} Make the two equal."


# %%
K = None  # your answer, a loop count
print(check_overshoot(K))

# %% [markdown]
# **Exercise 3.** The vocabulary of our puzzle has 32 tokens. A readout that knows nothing, not even the alphabet, gives all of
# them the same probability. What is its entropy in bits?


# %%
def check_entropy(bits):
    if bits is None:
        return "Not answered yet: put a number of bits in place of None."
    if abs(bits - math.log2(V)) < 0.01:
        return "Right: log2 of 32. A readout on its way there is leaving the format, whatever its accuracy says."
    if bits == 1:
        return "Not yet: one bit is a readout undecided between two tokens. It would still keep the format."
    if bits == 0:
        return (
            "Not yet: zero bits is a readout that is sure of one token. Whether that token is an answer, entropy does not say."
        )
    return "Not yet: how many yes-or-no questions single out one of 32 equally likely tokens?"


# %%
bits = None  # your answer
print(check_entropy(bits))

# %% [markdown]
# ## 8. One answer, step by step
#
# The notebooks that follow use the library's models, which are transformers, on tasks that are not drawn as easily. Below, two of
# them that were trained alike but for the boundary norm (section 4.3, seed 0) read one circuit they never saw. Both were trained
# to answer at the dashed line. What happens to the right of it is what the contract paper is about.

# %%
jobs = []
for arm, boundary in ARMS.items():
    run = experiment.arm_run(p, "circuit", arm, seed=0)
    sweeps = ((boundary, 8 * p["r0"]), (experiment.other(arm), 8 * p["r0"]))
    jobs.append(Job(run, sweeps, p["n_test"], paths.runs()))
finished = experiment.make(jobs, p["workers"] or None, title="guide")

# %%
rows = []
for arm, job, found in zip(ARMS, jobs, finished, strict=True):
    read = experiment.readings_in(found["sweeps"][0], job.run.task.max_depth)
    for metric, values in {"norm": read.norm, "entropy": read.entropy, "gap": read.gap}.items():
        rows += [(arm, k + 1, metric, v[instance]) for k, v in enumerate(values)]
frame = pd.DataFrame(rows, columns=["arm", "K", "metric", "value"])
names = {
    "norm": "L2 norm of the raw state",
    "entropy": "readout entropy (bits)",
    "gap": "top-1 minus top-2 logit",
}
out.chart(plots.steps(frame, names, p["r0"]), "one_answer")

# %% [markdown]
# Left: how long the state vector is before any norm. Middle: how undecided the readout is over the whole vocabulary (one bit:
# undecided between two answers). Right: how far the first choice is ahead of the second.
#
# Next: [4.3](4_3_scratch_training.ipynb) trains both arms many times and judges the paper's claims;
# [99](99_verdicts.ipynb) collects every verdict.

# %%
assert same and frame["value"].notna().all(), "the loop by hand is the model's own, and every number is finite"
assert by_norm.drop(columns=["arm", "task"]).notna().all(axis=None)
first = pd.concat([readings(both, near, 1), readings(both, near, 1, swap=True)])
assert first.groupby("seed")["solved"].nunique().eq(1).all(), "at K = 1 there is no boundary: both loops are one"
folder = out.finish(chosen, [], {"models": 0})

# %% [markdown]
# ## Glossary
#
# ### The model
#
# * <a id="state"></a>**State** z: the vectors that the loop changes, one a token. *Raw*: as a step returns it, before any norm.
# * <a id="loop-step"></a>**Loop step**: one application of the core to the state. <a id="loops-K"></a>**Loops K**: how many are
#   made; the papers also write r.
# * <a id="prelude"></a>**Prelude**: layers that run once, before the loop; their output is e.
# * <a id="core"></a>**Core**: the layers that are looped; the papers also say block.
# * <a id="coda"></a>**Coda**: layers that run once, after the loop.
# * <a id="envelope"></a>**Envelope**: how layers are shared out between prelude, core and coda. *Full stack*: all are looped, as
#   in Ouro. *Sandwich*: a core between a prelude and a coda, as in Huginn.
# * <a id="injection"></a>**Injection**: e, or the token embeddings, enters the state again at every step.
# * <a id="initial-state"></a>**Initial state**: where the loop starts: the input, zeros, or noise. *H/L states*: two states, a high
#   and a low one, updated in turn.
# * <a id="trajectory"></a>**Trajectory**: the states z_1 to z_K of one pass.
# * <a id="boundary"></a>**Boundary**: the place between two loop steps. <a id="boundary-norm"></a>**Boundary norm**: a norm there;
#   *every step* as in Ouro, *never* as in Huginn, or every k-th step.
# * <a id="readout"></a>**Readout**: what turns a state into logits: coda, norm, head. *Raw readout*: without the norm.
# * <a id="expert"></a>**Expert**: one of several feed-forward networks of a mixture-of-experts layer.
#   <a id="router"></a>**Router**: chooses a token's experts. *Balance loss*: 1 when all experts are used alike, larger when not.
#
# ### Running it
#
# * <a id="trained-budget"></a>**Trained budget r0**: the loop count of training.
# * <a id="overshoot"></a>**Overshoot**: K / r0.
# * <a id="contract"></a>**Contract**: a readout may be used with the loop it was trained on; what keeps loop steps usable is that the
#   two agree.
# * <a id="intact"></a>**Intact**: a model run with its own boundary. *Removed*, *added*: the boundary norm taken out of the loop, or
#   put into it, after training.
# * <a id="alphabet"></a>**Alphabet**: the tokens that can be answers. <a id="format-collapse"></a>**Format collapse**: a readout
#   that answers outside it.
# * <a id="readout-entropy"></a>**Readout entropy**: of the output distribution over the whole vocabulary, in bits.
#   <a id="modal-share"></a>**Modal share**: how often the commonest prediction is made.
# * <a id="relative-update"></a>**Relative update**: how far a step moves the state, over the state's length.
# * <a id="refit"></a>**Refit**: training one part again over a frozen rest. <a id="probe"></a>**Probe**: a linear readout fitted to
#   frozen states, to see whether an answer is in them.
#
# ### Judging it
#
# * <a id="task"></a>**Tasks**: *circuit* evaluates Boolean circuits, *hops* follows pointers, *paragg* takes the parity of several
#   answers. d*: the depth that an instance needs.
# * <a id="arm"></a>**Arm**: one of the designs that are compared, alike in all but what is asked about.
# * <a id="seed"></a>**Seed**: one repetition of an arm with other random numbers; a point in a figure.
# * <a id="pair"></a>**Pair**: one model and one task.
# * <a id="stand-in"></a>**Stand-in**: a small model trained here in the style of a released one, where the released one is out of
#   reach.
# * <a id="floor"></a>**Floor**: what can be scored with no skill: chance within the alphabet, or the best constant answer.
# * <a id="competence-gate"></a>**Competence gate**: a pair is judged only if its intact arm does the task: its best accuracy over K
#   reaches 0.30 and exceeds the floor by more than 0.05.
# * <a id="cliffs-delta"></a>**Cliff's delta**: how often a seed of one arm beats a seed of the other, minus how often it loses;
#   from -1 to 1, 0 for no difference.
# * <a id="mann-whitney"></a>**Exact Mann-Whitney**: the rank test over seeds that goes with it. <a id="mcnemar"></a>**Exact
#   McNemar**: the test for one model under two loops, instance by instance.
# * <a id="bootstrap"></a>**Bootstrap interval**: the range of a mean over resampled seeds or instances, 95 % here.
# * <a id="holm"></a>**Holm**: a correction of p-values where several are looked at, so that all of them may be.
# * <a id="verdict"></a>**Verdict**: what a rule, written before the run, says of a claim: see [99](99_verdicts.ipynb).
