"""Small texts of few words for tests that need a corpus."""

import random

WORDS = "the loop step state norm reads writes a of and then its model depth once more again every".split()


def _text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(4, 40))) + rng.choice([".", "?", "\n"])


TEXTS = [_text(random.Random(seed)) for seed in range(80)]
