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
# A looped (depth-recurrent) language model applies one stack of layers again and again. Depth becomes a number that can be
# chosen when the model is run: K loop steps, whatever the r0 it was trained with. This guide builds one by hand, shows the
# two places where its state can be normalised, and draws one answer as it forms, step by step.
#
# **Claim it prepares** (contract paper, section 4.3): the state of a model trained without the boundary norm grows by a factor
# of 4.84 over the loop counts 1 to 32, with the norm by 1.45, and it is the growing one that keeps its accuracy. This guide
# judges nothing: its rule is only that every number below is finite and the loop by hand equals the model's own, bit for bit.
#
# Under a minute at the smoke scale shown in `notebooks/`; the same guide with two laptop models, some two minutes where they
# are not trained yet, is [here](../outputs/laptop/00_reading_guide/notebook.ipynb).

# %% tags=["parameters"]
scale: str = "smoke"  # whose models to draw: smoke, laptop, overnight or paper
instance: int = 0  # which test instance to follow

# %%
import pandas as pd
import torch
from transformers.utils import logging

from lib import experiment, foreign, instruments, params, paths, plots, results
from lib.boundary import never
from lib.config import LoopedConfig
from lib.experiment import ARMS, Job
from lib.looped import build

chosen = params.of(globals())
out = results.begin("00_reading_guide", scale)
plots.setup()
logging.set_verbosity_error()  # nothing about faster kernels that are not installed

# %% [markdown]
# ## A looped model by hand
#
# Four verbs are all there is: `embed` the tokens (through a prelude, where there is one), `init_state`, `step` as often as
# wanted, and `readout`. The loop below is the whole model.

# %%
p = params.load("4_3_scratch_training", scale)
run = experiment.arm_run(p, "circuit", "no_norm", seed=0)
model = build(run.config(), seed=0)
test = experiment.strata(run.task, 64)[run.task.max_depth]
ids = torch.as_tensor(test.ids)
with torch.no_grad():
    e = model.embed(ids)
    z = model.init_state(e)
    for t in range(4):
        z = model.step(z, e, t, never)
    logits = model.readout(z)
    print(
        "by hand and forward(loops=4) bitwise equal:",
        torch.equal(logits, model(ids, loops=4, boundary=never).logits),
    )

# %% [markdown]
# ## Two places for one norm
#
# The readout normalises the state before the head reads it. Ouro also normalises it at the end of every loop step, with the
# same module; Huginn does not. Instrumentation tells them apart without reading any code: count every norm's calls at two loop
# counts (2 and 5 here). A count that grows acts inside the loop: within one of its layers, or at its boundary, beside them.
# Below, our model in the two styles, and six looped classes that the installed transformers library ships, each small and
# random.

# %%
styles = {
    "Ouro's style": {"core": 2, "block": "sandwich", "boundary": 1},
    "Huginn's style": {"prelude": 1, "core": 2, "coda": 1, "block": "sandwich_sum", "readout_order": "norm_coda_norm"},
}
cases = {}
for style, values in styles.items():
    own = build(LoopedConfig(vocab_size=model.config.vocab_size, **values), seed=0)
    cases[style] = (own, lambda m, loops: m(ids[:1], loops=loops))
cases |= {name: (foreign.tiny(name), foreign.run) for name in foreign.CLASSES}
found = {name: instruments.norms(m, (2, 5), run) for name, (m, run) in cases.items()}
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
# ## One answer, step by step
#
# Below, two models that were trained alike but for that norm (section 4.3, seed 0) read one circuit they never saw. Both were
# trained to answer at the dashed line. What happens to the right of it is what the contract paper is about.

# %%
jobs = []
for arm, boundary in ARMS.items():
    run = experiment.arm_run(p, "circuit", arm, seed=0)
    sweeps = ((boundary, 8 * p["r0"]), (experiment.other(arm), 8 * p["r0"]))
    jobs.append(Job(run, sweeps, p["n_test"], paths.runs()))
made = experiment.make(jobs, p["workers"] or None, title="guide")

# %%
rows = []
for arm, job, found in zip(ARMS, jobs, made, strict=True):
    readings = experiment.readings_in(found["sweeps"][0], job.run.task.max_depth)
    measures = {"norm": readings.norm, "entropy": readings.entropy, "gap": readings.gap}
    for metric, values in measures.items():
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
assert frame["value"].notna().all()
folder = out.finish(chosen, [], {"models": 0})
