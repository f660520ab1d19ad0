"""Train a micro-model through a curriculum of growing documents or conversations."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
from torch.nn.functional import cross_entropy

from tools.recall.rows import UNLABELLED, Batch, Stage, Variety, make_batch

STAGES = (
    Stage(min_facts=6, max_facts=12, max_noise=0.0, width=64, num_rows=48),
    Stage(min_facts=3, max_facts=12, max_noise=1.0, width=96, num_rows=32),
    Stage(min_facts=12, max_facts=24, max_noise=0.5, width=128, num_rows=24),
    Stage(min_facts=24, max_facts=48, max_noise=1.0, width=256, num_rows=12),
    Stage(min_facts=48, max_facts=96, max_noise=1.0, width=512, num_rows=6),
    Stage(min_facts=62, max_facts=124, max_noise=2.0, width=768, num_rows=4),
)
STATE_STAGES = (
    Stage(min_facts=6, max_facts=12, max_noise=0.0, width=64, num_rows=32),
    Stage(min_facts=8, max_facts=20, max_noise=0.5, width=96, num_rows=20),
    Stage(min_facts=16, max_facts=32, max_noise=0.5, width=176, num_rows=12),
)
"""A state holds as many facts as its size allows, a KV cache all of them."""
VARIED = Variety(chat=0.2, round_trip=0.2)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a model learns, and for how long."""

    seed: int = 0
    num_steps: int = 1700
    peak_lr: float = 2e-3
    warmup_steps: int = 100


class Draw(Protocol):
    """Draws the rows of a step at `level`; `reached`: the hardest level so far."""

    def __call__(self, rng: Random, level: int, reached: int) -> Batch: ...


@dataclass(frozen=True, slots=True)
class Recipe(Pace):
    """Everything the weights depend on. Equal recipes on equal machines give equal weights."""

    stages: tuple[Stage, ...] = STAGES
    variety: Variety = VARIED
    """From the second stage on; the first has none, so that the lookup itself is learnt first."""

    def draw(self, rng: Random, level: int, reached: int) -> Batch:
        return make_batch(rng, self.stages[level], self.variety if reached else Variety())


class Curriculum:
    """Chooses each step's stage: moves on once the running accuracy is high, and goes back now and then."""

    def __init__(self, num_stages: int, rng: Random) -> None:
        self._num_stages = num_stages
        self._rng = rng
        self._accuracy = 0.0
        self._steps_here = 0
        self.level = 0
        """Index of the hardest stage reached."""

    def choose(self) -> int:
        """The level to train at next; four times in ten an earlier one, so that short documents stay right."""
        return self.level if self._rng.random() < 0.6 else self._rng.randrange(self.level + 1)

    def record(self, level: int, accuracy: float) -> None:
        """Take note of a step's share of right tokens, 0 to 1."""
        if level != self.level:
            return
        self._accuracy += 0.05 * (accuracy - self._accuracy)
        self._steps_here += 1
        if self._accuracy > 0.985 and self._steps_here > 60 and self.level + 1 < self._num_stages:
            self.level, self._accuracy, self._steps_here = self.level + 1, 0.0, 0


def learning_rate(pace: Pace, step: int) -> float:
    """Linear warm-up, then half a cosine down to 2 % of the peak."""
    warmup = min(1.0, (step + 1) / pace.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * step / pace.num_steps))
    return pace.peak_lr * warmup * (0.02 + 0.98 * cosine)


def train(model: Any, recipe: Recipe) -> float:
    """Train on documents; see `learn`."""
    return learn(model, recipe, len(recipe.stages), recipe.draw)


def learn(model: Any, pace: Pace, num_stages: int, draw: Draw) -> float:
    """Train in place and return the CPU seconds it took. Prints a line every 50 steps."""
    began_s = time.process_time()
    rng = Random(pace.seed)
    curriculum = Curriculum(num_stages, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=pace.peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(pace.num_steps):
        level = curriculum.choose()
        batch = draw(rng, level, curriculum.level)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(pace, step)
        loss, accuracy = _step(model, optimizer, batch)
        curriculum.record(level, accuracy)
        if step % 50 == 49:
            spent_s = time.process_time() - began_s
            print(f"step {step + 1} {spent_s:.0f} s stage {curriculum.level} loss {loss:.3f} accuracy {accuracy:.3f}")
    return time.process_time() - began_s


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[float, float]:
    """One update. Returns (loss, share of right tokens) before it."""
    labelled = batch.labels != UNLABELLED
    hidden = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state[labelled]  # [labels, hidden]
    logits = model.lm_head(hidden)  # [labels, vocab]
    wanted = batch.labels[labelled]  # [labels]
    loss = cross_entropy(logits, wanted)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), (logits.argmax(-1) == wanted).float().mean().item()


def save(
    folder: Path, model: Any, tokenizer: Any, program: str, recipe: Pace, cpu_s: float, scores: Mapping[str, Any]
) -> None:
    """The checkpoint, and how `program` made it, as a file that is named after the last word of the program."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    report = {
        "made_by": program,
        "recipe": asdict(recipe),
        "torch": torch.__version__,
        "cpu_seconds": round(cpu_s),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "scores": scores,
    }
    (folder / f"{program.rpartition('_')[2]}.json").write_text(json.dumps(report, indent=1) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)
