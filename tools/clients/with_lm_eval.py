"""lm-eval: what it scores the recall model at, whose answers are all right where a server computes rightly."""

import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools.clients.harness import Check, Server, require, run

_NUM_DOCUMENTS, _NUM_FACTS, _NUM_NAMES = 10, 8, 9
"""So many names the model says when it is asked in a chat; the first is the one asked for."""
_CHOICE, _GENERATE, _CHAT = "recall_choice", "recall_generate", "recall_chat"
_GENERATING: dict[str, Any] = {
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["\n", ";", "?", ".", "Facts"], "max_gen_toks": _NUM_NAMES, "temperature": 0.0},
    "filter_list": [{"name": "stripped", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
    "metric_list": [{"metric": "exact_match"}],
}
_TASKS: dict[str, dict[str, Any]] = {
    _CHOICE: {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}],
    },
    _GENERATE: {**_GENERATING, "doc_to_target": "{{chain}}"},
    _CHAT: {**_GENERATING, "doc_to_target": "{{chat}}"},
}


def _document(names: list[str], rng: random.Random) -> dict[str, object]:
    """Facts that are one cycle of names, a question, and what follows."""
    cycle = rng.sample(names, _NUM_FACTS)
    facts = [f"{name} {cycle[at - _NUM_FACTS + 1]}" for at, name in enumerate(cycle)]
    rng.shuffle(facts)
    asked = rng.randrange(_NUM_FACTS)
    said, *chain = [cycle[(asked + step) % _NUM_FACTS] for step in range(_NUM_NAMES + 1)]
    choices = [chain[0], *rng.sample([name for name in cycle if name != chain[0]], 3)]
    rng.shuffle(choices)
    prompt = f"Facts: {'; '.join(facts)};? {said}"
    right = choices.index(chain[0])
    chat = " ".join([said, *chain[:-1]])
    return {"prompt": prompt, "chain": " ".join(chain), "chat": chat, "choices": choices, "right": right}


def _write_tasks(folder: Path, model: str) -> None:
    tokens = json.loads((Path(model) / "tokenizer.json").read_text())["added_tokens"]
    names = [token["content"][1:] for token in tokens if token["content"].startswith(" ")]
    rng = random.Random(5)
    documents = folder / "documents.jsonl"
    documents.write_text("".join(f"{json.dumps(_document(names, rng))}\n" for _ in range(_NUM_DOCUMENTS)))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
    }
    for name, task in _TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **shared, **task}))  # JSON is YAML


@cache
def _scores(server: Server, route: str, tasks: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Task |-> metric |-> value, of one run over /v1/`route`."""
    kind = f"local-{route.replace('/', '-')}"
    asked = {"model": server.model, "base_url": f"{server.url}/v1/{route}", "tokenizer": server.path}
    listed = ",".join(f"{key}={value}" for key, value in asked.items())
    with TemporaryDirectory() as name:
        folder = Path(name)
        _write_tasks(folder, server.path)
        argv = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", f"{listed},num_concurrent=2"]
        argv += ["--tasks", *tasks, "--include_path", str(folder), "--output_path", str(folder / "out")]
        argv += ["--apply_chat_template"] if route == "chat/completions" else []
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
        require(done.returncode == 0, done.stderr[-500:])
        (written,) = (folder / "out").rglob("results_*.json")
        found: dict[str, dict[str, float]] = json.loads(written.read_text())["results"]
    return found


def _score(server: Server, route: str, tasks: tuple[str, ...], task: str) -> float:
    """The value of the task's one metric."""
    found = _scores(server, route, tasks)[task]
    metric, *_ = (key for key in found if key.split(",")[0] in ("acc", "exact_match"))
    return found[metric]


def completions_multiple_choice(server: Server) -> None:
    require(_score(server, "completions", (_CHOICE, _GENERATE), _CHOICE) == 1.0)


def completions_generate_until_5_stops(server: Server) -> None:
    require(_score(server, "completions", (_CHOICE, _GENERATE), _GENERATE) == 1.0)


def chat_generate_until(server: Server) -> None:
    require(_score(server, "chat/completions", (_CHAT,), _CHAT) == 1.0)


CHECKS: list[Check] = [completions_multiple_choice, completions_generate_until_5_stops, chat_generate_until]

if __name__ == "__main__":
    run(CHECKS)
