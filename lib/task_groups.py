"""The task families by the axes paper's benchmark groups, what each stands for, and the mixture of all of them."""

from lib.mixture import Mixture
from lib.task_arithmetic import Arithmetic
from lib.task_constrained import Constrained
from lib.task_knowledge import Knowledge
from lib.tasks import Task

GROUPS = {
    "context": ("hops", "circuit"),
    "quantitative": ("arithmetic",),
    "knowledge": ("knowledge",),
    "constrained": ("constrained",),
}
# arithmetic comes twice: it is learned last, and its sequences are the shortest
TURNS = ("hops", "circuit", "arithmetic", "knowledge", "constrained", "arithmetic")
STANDS_FOR = {
    "context": "It stands for BBH-CoT and DROP: answers computed from what the prompt states. "
    "It has no language to read, no written chain of thought, and an answer of one token.",
    "quantitative": "It stands for GSM8K and MATH500: several steps of calculation, each on the result of the one before. "
    "It has no word problem, no choice of which steps to take, and one small number as its answer.",
    "knowledge": "It stands for MMLU, TriviaQA, ARC-C and HellaSwag: recall of what training put into the weights. "
    "It has no knowledge of the world, no plausibility of language, and a random table that nothing but memory helps with.",
    "constrained": "It stands for HumanEval+ and MBPP+: output that a checker holds against stated requirements. "
    "It has no code and runs none, and an answer of a few letters.",
}


def make(p: dict) -> Mixture:
    """The mixture of all families at the notebook's parameters. Raises ValueError when a task is impossible."""
    return Mixture(
        (
            Task("hops", p["hops_width"], p["hops_depth"]),
            Task("circuit", p["circuit_width"], p["circuit_depth"]),
            Arithmetic(p["modulus"], p["arithmetic_depth"]),
            Knowledge(p["subjects"], p["relations"], p["objects"]),
            Constrained(p["letters"], p["length"], p["constraints"]),
        ),
        TURNS,
    )
