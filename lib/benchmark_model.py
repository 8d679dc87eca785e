"""A looped model as lm-eval sees it: likelihoods and generation in batches, at one loop count and boundary.

Left padding, with positions counted from each row's first real token, changes no score. lm-eval is optional: `make
benchmark-tools` installs it. Shapes: B rows of a batch, T tokens, A answered tokens, V vocabulary.
"""

import json
import os
from collections.abc import Iterator
from itertools import groupby

import huggingface_hub
import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList

from lib import family_axes, progress
from lib.boundary import Boundary
from lib.looped import LoopedModel

# both are read when datasets is imported, which lm-eval does; who wants data sets downloaded sets them to 0
for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.setdefault(_name, "1")
if os.environ["HF_HUB_OFFLINE"].upper() in ("1", "ON", "YES", "TRUE"):
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # where it was imported before
try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
except ImportError as missing:
    raise RuntimeError(f"lm-eval cannot be imported ({missing}): `make benchmark-tools` installs it beside the rest") from None

LONGEST = 4096  # tokens of a prompt, where neither the task's protocol nor the caller says
NEW_TOKENS = 256  # where the task does not say
LOGITS = 2**28  # numbers of one batch's logits; one row may need more
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
SETTINGS = ("until", "max_gen_toks", "max_new_tokens", "do_sample", "num_beams", *SAMPLING)


class LoopedLM(LM):
    """A looped model as lm-eval sees it, at one loop count and boundary.

    Prompts longer than max_length, for a likelihood with the text that is scored, keep their last tokens. add_bos: whether
    each text begins with the beginning-of-text token, None: what tokenizer and family say (`beginning`).
    """

    def __init__(
        self,
        model: LoopedModel,
        tokenizer: PreTrainedTokenizerBase,
        loops: int | None = None,
        boundary: Boundary | None = None,
        batch_size: int = 8,
        max_length: int = LONGEST,
        add_bos: bool | None = None,
        family: str = "",
    ):
        super().__init__()
        self.model, self.tokenizer, self.batch_size, self.max_length = model, tokenizer, batch_size, max_length
        self.loops = model.config.loops if loops is None else loops
        self.boundary = Boundary(model.config.boundary) if boundary is None else boundary
        self.start = beginning(model, tokenizer, add_bos, family)
        settings = model.generation_config
        stop = settings.eos_token_id if settings.eos_token_id is not None else tokenizer.eos_token_id
        self.stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
        first = [settings.bos_token_id, tokenizer.bos_token_id, *self.stops]
        self.first = self.start or [token for token in first if token is not None][:1]  # before a text without a context

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for lm-eval's records."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tokens(self, text: str) -> list[int]:
        """The token ids of a text, without anything before or behind it."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def context(self, text: str) -> list[int]:
        """The token ids of a text as the model is given it; never none. Raises ValueError where there would be none."""
        ids = self.tokens(text)
        ids = ids if self.start and ids[: len(self.start)] == self.start else [*self.start, *ids]
        if not ids and not self.first:
            raise ValueError(
                "a task asks for a text without a context, and the tokenizer has no token that begins or ends a text: "
                "give it one, or leave that task out"
            )
        return ids or self.first

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of a context and of what follows it, split as the context alone is; spaces between go to the latter."""
        kept = context.rstrip()
        before, whole = self.context(kept), self.tokens(kept + context[len(kept) :] + continuation)
        if not kept:
            return before, whole
        whole = whole if whole[: len(self.start)] == self.start else [*self.start, *whole]
        return before, whole[len(before) :]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation given its context, and whether greedy decoding would write it."""
        return self.scores([self.pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text; one that is longer than max_length in parts, each behind all that fits."""
        parts, owner = [], []
        for i, request in enumerate(requests):
            ids, before = self.tokens(request.args[0]), self.context("")
            for begin in range(0, len(ids), self.max_length):
                end = min(begin + self.max_length, len(ids))
                # the last part is scored behind as many tokens as fit
                seen = [*before, *ids][max(0, len(before) + end - self.max_length - 1) : len(before) + begin]
                parts.append((seen, ids[begin:end]))
                owner.append(i)
        totals = [0.0] * len(requests)
        for i, (score, _) in zip(owner, self.scores(parts), strict=True):
            totals[i] += score
        return totals

    @torch.inference_mode()
    def scores(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Log-likelihood and whether greedy, of (context, continuation) in token ids; one pass for equal inputs.

        Raises ValueError for a continuation longer than max_length, whose first tokens would have no context.
        """
        found, wanted = [(0.0, True)] * len(pairs), {}
        for i, (context, continuation) in enumerate(pairs):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"max_length is {self.max_length}: it must be at least {len(continuation)}, the tokens of an answer"
                )
            if continuation:
                row = tuple([*context, *continuation][:-1][-self.max_length :])
                wanted.setdefault(row, []).append(i)
        rows = list(wanted)
        answers = [max(len(pairs[i][1]) for i in wanted[row]) for row in rows]
        with progress.Bar(total=len(rows), desc=f"{self.loops} loops, likelihoods", disable=not rows) as bar:
            for batch in batches([*map(len, rows)], answers, self.batch_size, self.model.config.vocab_size):
                logits = self.logits([rows[k] for k in batch], max(answers[k] for k in batch))
                total, best = logits.logsumexp(dim=-1), logits.argmax(dim=-1)
                for b, k in enumerate(batch):
                    for i in wanted[rows[k]]:
                        answer = torch.tensor(pairs[i][1], device=logits.device)
                        at = slice(logits.shape[1] - len(answer), None)
                        score = logits[b, at].gather(-1, answer[:, None])[:, 0] - total[b, at]
                        found[i] = score.sum().item(), bool((best[b, at] == answer).all())
                bar.update(len(batch))
        return found

    def logits(self, rows: list[tuple[int, ...]], answers: int) -> torch.Tensor:
        """Logits (B, A, V) at the last `answers` tokens of each row, in float32 at least."""
        ids, mask = padded(rows, self.tokenizer.pad_token_id, self.model.device)
        how = {"loops": self.loops, "boundary": self.boundary, "logits_to_keep": answers}
        made = self.model(ids, attention_mask=mask, **how).logits
        return made.to(torch.promote_types(made.dtype, torch.float32))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes behind each prompt, greedily unless the task samples, up to one of the task's strings.

        Raises ValueError for a setting of generation that is not known here.
        """
        found = [""] * len(requests)
        by_settings = sorted((json.dumps(request.args[1], sort_keys=True), i) for i, request in enumerate(requests))
        with progress.Bar(total=len(requests), desc=f"{self.loops} loops, generation", disable=not requests) as bar:
            for text, group in groupby(by_settings, key=lambda pair: pair[0]):
                settings, own = json.loads(text), [i for _, i in group]
                rows = [tuple(self.context(requests[i].args[0])[-self.max_length :]) for i in own]
                for batch in batches([*map(len, rows)], [1] * len(rows), self.batch_size, self.model.config.vocab_size):
                    for k, written in zip(batch, self.written([rows[k] for k in batch], settings), strict=True):
                        found[own[k]] = written
                    bar.update(len(batch))
        return found

    @torch.inference_mode()
    def written(self, rows: list[tuple[int, ...]], settings: dict) -> list[str]:
        """The text behind each row of token ids, under one task's settings of generation."""
        if unknown := sorted(set(settings) - set(SETTINGS)):
            raise ValueError(f"generation_kwargs has {unknown[0]}: it must be one of {', '.join(SETTINGS)}")
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else [text for text in until if text]
        special = self.tokenizer.get_added_vocab()
        stops = [*self.stops, *(special[text] for text in until if text in special)]
        sampled = bool(settings.get("do_sample")) and settings.get("temperature") != 0
        ids, mask = padded(rows, self.tokenizer.pad_token_id, self.model.device)
        tail = max((len(text.encode()) for text in until), default=0) + 4  # a token is a byte at least

        def ended(ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
            texts = self.text(ids[:, T:][:, -tail:])
            return torch.tensor([any(stop in text for stop in until) for text in texts], device=ids.device)

        T = ids.shape[1]
        out = self.model.generate(
            ids,
            attention_mask=mask,
            loops=self.loops,
            boundary=self.boundary,
            max_new_tokens=settings.get("max_gen_toks") or settings.get("max_new_tokens") or NEW_TOKENS,
            do_sample=sampled,
            num_beams=settings.get("num_beams", 1),
            eos_token_id=stops or None,
            pad_token_id=self.tokenizer.pad_token_id,
            stopping_criteria=StoppingCriteriaList([ended] if until else []),
            **({name: settings[name] for name in SAMPLING if name in settings} if sampled else {}),
        )
        ends = [next((i for i, token in enumerate(row) if token in stops), len(row)) for row in out[:, T:].tolist()]
        texts = self.text([row[:end] for row, end in zip(out[:, T:].tolist(), ends, strict=True)])
        return [text[: min([len(text), *(text.find(stop) for stop in until if stop in text)])] for text in texts]

    def text(self, rows: torch.Tensor | list[list[int]]) -> list[str]:
        """The text of rows of token ids, without special tokens."""
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def beginning(model: LoopedModel, tokenizer: PreTrainedTokenizerBase, add_bos: bool | None, family: str = "") -> list[int]:
    """The token ids that each text begins with.

    By default those that the tokenizer itself puts there; the axes paper's tokenizers put none and its protocol has one, so
    there it is the beginning-of-text token, where there is one. Raises ValueError when add_bos asks for one that is not there.
    """
    own = tokenizer("a", return_special_tokens_mask=True)
    count = (own["special_tokens_mask"] + [0]).index(0)
    own, bos = own["input_ids"][:count], model.generation_config.bos_token_id
    bos = tokenizer.bos_token_id if bos is None else bos
    if add_bos is False:
        return []
    if add_bos and not own and bos is None:
        raise ValueError("add_bos is true, and neither model nor tokenizer has a token that begins a text: it must be false")
    wanted = add_bos or family == family_axes.NAME
    return own or ([bos] if wanted and bos is not None else [])


def batches(lengths: list[int], answers: list[int], batch_size: int, vocabulary: int) -> Iterator[list[int]]:
    """Row numbers in batches of similar length, longest first, so that what does not fit in memory shows at once."""
    batch, most = [], 0
    for k in sorted(range(len(lengths)), key=lambda k: (-lengths[k], -answers[k], k)):
        most = max(most, answers[k])
        if batch and (len(batch) == batch_size or (len(batch) + 1) * most * vocabulary > LOGITS):
            yield batch
            batch, most = [], answers[k]
        batch.append(k)
    if batch:
        yield batch


def padded(rows: list[tuple[int, ...]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of token ids padded on the left, and their mask, 1 at real tokens: (B, T) each."""
    T = max(map(len, rows))
    ids = torch.tensor([[pad] * (T - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (T - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
