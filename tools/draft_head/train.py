"""Train a head on chats: at each position of an answer it learns the model's own distribution of the next token."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.compute.layers.rope import Rope
from deltaserve.model.layers.layer_spec import RopeSpec
from tools.draft_head.chats import Chat
from tools.draft_head.head import TrainedHead
from tools.draft_head.lessons import Lesson, lessons

_DECAY = 0.8
"""By which the loss of each further guess counts less: it is only asked for where those before it were right."""


_SCALES = tuple(0.6 * 1.12**number for number in range(12))
_TELLS = 50
"""Steps between two lines of progress."""
_CALIBRATED = 64
"""Chats that logits are scaled by."""


@dataclass(frozen=True, slots=True)
class TrainRecipe:
    """What the weights depend on, beside the chats. Equal recipes on equal machines give equal weights."""

    seed: int = 0
    num_epochs: int = 6
    chats_per_step: int = 6
    peak_lr: float = 1e-3
    warmup_steps: int = 60
    num_passes: int = 3
    """Guesses in a row that it learns to make; in the first half of the training the first alone, which takes less."""
    most_seconds: float | None = None
    """The learning rate falls, and training ends, by this time or by the number of epochs, whichever comes first. Where
    it is the time, weights are not the same each time."""


@dataclass(frozen=True, slots=True)
class TargetTables:
    """Tables of the model, float32."""

    embedding: Tensor  # [V, hidden]
    output: Tensor  # [guessable, hidden]: rows of its output matrix, of the tokens that the head chooses among
    guessable: Tensor  # [guessable] int64, ascending
    rope: RopeSpec


@dataclass(frozen=True, slots=True)
class Exam:
    """Results on chats that nothing was learnt from."""

    right: tuple[float, ...]
    """How often each guess is right where all before it are."""
    accepted: float
    """Guesses that are right before the first wrong one, of as many as there are passes."""

    def __str__(self) -> str:
        shares = " ".join(f"{share:.3f}" for share in self.right)
        return f"right {shares}, accepted of {len(self.right)}: {self.accepted:.2f}"


class Trainer:
    """Trains one head."""

    def __init__(self, head: TrainedHead, tables: TargetTables, recipe: TrainRecipe) -> None:
        self._head = head
        self._tables = tables
        self._recipe = recipe
        self._rope = Rope(tables.rope, torch.device("cpu"))
        self._line = torch.full((len(tables.embedding),), -1)  # token |-> its line in the head's output matrix
        self._line[tables.guessable] = torch.arange(len(tables.guessable))

    def train(self, chats: Sequence[Chat], held_out: Sequence[Chat], tell: Callable[[str], None]) -> Exam:
        """In place. `tell` is told of each epoch, and of the learning on the way. Returns the last exam."""
        recipe, head = self._recipe, self._head
        learnt = [parameter for parameter in head.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learnt, lr=recipe.peak_lr, betas=(0.9, 0.95), weight_decay=0.01)
        num_steps = recipe.num_epochs * -(-len(chats) // recipe.chats_per_step)
        began, rng, step, loss = time.monotonic(), Random(recipe.seed), 0, 0.0
        while True:
            for lesson in lessons(chats, recipe.chats_per_step, rng):
                share = step / num_steps
                if recipe.most_seconds is not None:
                    share = max(share, (time.monotonic() - began) / recipe.most_seconds)
                if share >= 1.0:
                    break
                for group in optimizer.param_groups:
                    group["lr"] = recipe.peak_lr * _rate(share, step, recipe.warmup_steps)
                loss += self._learn(lesson, optimizer, learnt, recipe.num_passes if share >= 0.5 else 1)
                step += 1
                if step % _TELLS == 0:
                    tell(f"step {step}, {share:.0%} of the training, loss {loss / _TELLS:.3f}")
                    loss = 0.0
            exam = self.examine(held_out)
            tell(f"{step / num_steps * recipe.num_epochs:.1f} epochs: {exam}")
            if share >= 1.0 or step >= num_steps:
                return exam

    @torch.inference_mode()
    def examine(self, chats: Sequence[Chat]) -> Exam:
        num_passes = self._recipe.num_passes
        counts = [0] * (num_passes + 1)  # roots, then those behind which so many guesses are right
        for lesson in lessons(chats, self._recipe.chats_per_step, Random(0)):
            states, wanted = self._states(lesson, num_passes), self._targets(lesson)
            best = torch.where(self._line[lesson.drawn] >= 0, wanted.argmax(-1), -1)
            chained = torch.zeros(lesson.tokens.numel(), dtype=torch.bool).index_fill(0, lesson.asked, True)
            counts[0] += int(chained.sum())
            for number, state in enumerate(states):
                is_right = torch.zeros_like(chained)
                is_right[lesson.asked] = self._logits(state, lesson).argmax(-1) == best
                chained &= is_right.roll(-number)  # a chain that would leave its text meets a position without answer
                counts[number + 1] += int(chained.sum())
        right = tuple(after / max(1, before) for before, after in pairwise(counts))
        return Exam(right, sum(counts[1:]) / max(1, counts[0]))

    @torch.inference_mode()
    def calibrate(self, chats: Sequence[Chat]) -> float:
        """Scale the logits, by what is returned, so that how likely the head holds its guess is how often that is the
        model's first choice. It has learnt what the model may say, but answers are greedy more often than not, and in
        service it decides by this how many guesses are worth making. The guesses themselves stay the same.
        """
        totals = torch.zeros(len(_SCALES))
        for lesson in lessons(chats[:_CALIBRATED], self._recipe.chats_per_step, Random(0)):
            is_asked = self._line[lesson.drawn] >= 0
            best = self._targets(lesson)[is_asked].argmax(-1)
            logits = self._logits(self._states(lesson, 1)[0], lesson)[is_asked]
            totals += torch.stack([functional.cross_entropy(logits * s, best, reduction="sum") for s in _SCALES])
        scale = _SCALES[int(totals.argmin())]
        self._head.norm.weight.mul_(scale)
        return scale

    def _learn(
        self, lesson: Lesson, optimizer: torch.optim.Optimizer, learnt: Sequence[Tensor], num_passes: int
    ) -> float:
        """One update. Returns the loss of the first guess before it."""
        wanted = self._targets(lesson).softmax(-1)
        weights = (self._line[lesson.drawn] >= 0).float()
        weights /= weights.sum().clamp(min=1.0)
        losses = [
            (functional.cross_entropy(self._logits(state, lesson), wanted, reduction="none") * weights).sum()
            for state in self._states(lesson, num_passes)
        ]
        total = torch.stack([loss * _DECAY**number for number, loss in enumerate(losses)]).sum()
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        return losses[0].item()

    def _states(self, lesson: Lesson, num_passes: int) -> list[Tensor]:
        """States of each pass: [B, L, hidden]."""
        cos, sin = self._rope.tables(torch.arange(lesson.tokens.shape[1]), torch.float32)
        embedded = functional.embedding(lesson.tokens, self._tables.embedding)
        with torch.autocast("cpu", torch.bfloat16):
            return self._head.states(embedded.bfloat16(), lesson.read, (cos[:, 0], sin[:, 0]), num_passes)

    def _logits(self, state: Tensor, lesson: Lesson) -> Tensor:
        """[M, guessable] float32, behind the positions asked for"""
        with torch.autocast("cpu", torch.bfloat16):
            logits = self._head.logits(state.flatten(0, 1).index_select(0, lesson.asked))
        return logits.float()

    @torch.no_grad()
    def _targets(self, lesson: Lesson) -> Tensor:
        """[M, guessable] float32: the model's own logits"""
        return (lesson.normed @ self._tables.output.bfloat16().T).float()


def _rate(share: float, step: int, warmup_steps: int) -> float:
    """Share of the peak: linear warm-up, then half a cosine down to 2 %. `share`: of the training that is done."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    return min(1.0, (step + 1) / warmup_steps) * (0.02 + 0.98 * cosine)
