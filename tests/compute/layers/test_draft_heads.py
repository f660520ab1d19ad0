"""Heads that draft tokens against dense arithmetic: every position's guess, and guesses that follow from guesses.

Heads are fed chunk by chunk over pages, as a prompt is computed; what they read of the model is transformers' own.
"""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Query
from deltaserve.compute.attention.attention_choice import make_attention, open_native
from deltaserve.compute.collective.collective import ALONE, Collective
from deltaserve.compute.layers.decoder import Decoder
from deltaserve.compute.layers.draft_head import Drafted, DraftHead
from deltaserve.compute.layers.ops_choice import make_step_ops
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.compute.weights.block_matrix import BlockMatrix
from deltaserve.compute.weights.loader import load_weights
from deltaserve.compute.weights.weights import allocate, allocate_draft
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import PageGroup
from deltaserve.core.lifetime import KEEP_ALL
from deltaserve.core.quantization import Quantization
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.code_plan import CODE_RULES
from deltaserve.model.drafts.draft_algorithm import with_head
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.tensors import draft_parts
from deltaserve.model.weight_bytes import rank_weight_bytes
from tests.compute.layers.dense_heads import HEADS, NUM_GUESSES, dense_drafted, dense_head, drafting
from tests.compute.thread_ranks import ThreadCollective
from tests.fixtures.tiny_models import EAGLE3_HEAD, EAGLE3_MODEL

CPU = torch.device("cpu")
TOLERANCE = 2e-3


# ---------------------------------------------------------------- the head over pages


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) of one request, which are computed."""

    line: int
    start: int
    end: int


class World:
    """One rank's model, head and pages."""

    def __init__(self, path: Path, spec: ModelSpec, collective: Collective, page_size: int, choice: str) -> None:
        assert spec.draft is not None
        weights = load_weights(path, spec, torch.float32, CPU, collective.shard)
        native = open_native(choice, CPU, 1)
        ops = make_step_ops(native, torch.float32)
        self.spec = spec
        self.decoder = Decoder(spec, weights, ops, collective)
        self.head = DraftHead(spec.draft, weights, ops, collective)
        cache = spec.cache_spec(page_size, DType.FLOAT32)
        num_pages = 256 // page_size
        pool = KvPool(cache, (num_pages,) * cache.num_pools, CPU, collective.shard)
        tables = PageTable(cache.num_pools, 2, num_pages // 2)
        pages = random.Random(0).sample(range(num_pages), num_pages)
        for number in range(cache.num_pools):
            for line in (0, 1):
                tables.write(PoolId(number), line, 0, tuple(map(PageId, pages[line::2])))
        self.attention = make_attention(choice, native, pool, tables, self.decoder.local.query_heads)
        self.features: list[Tensor] = [torch.zeros(1, self.head.feature_size) for _ in (0, 1)]
        """[n + 1, F] of each request: what the head reads of the token before each of its tokens, zeros first."""

    @torch.inference_mode()
    def compute(self, prompts: Sequence[Sequence[int]], pieces: Sequence[Piece]) -> Drafted:
        """Model and head, one after the other, of a step."""
        batch, tokens = self._batch(prompts, pieces)
        positions = torch.from_numpy(batch.positions())
        attention, states = self.attention.begin_step(batch), self.attention.begin_states(batch)
        hidden = self.decoder.forward(tokens, positions, attention, None, states)
        lens = [piece.end - piece.start for piece in pieces]
        for piece, features in zip(pieces, torch.split(self.head.features(hidden), lens), strict=True):
            self.features[piece.line] = torch.cat((self.features[piece.line], features))
        return self.draft(prompts, pieces)

    @torch.inference_mode()
    def draft(self, prompts: Sequence[Sequence[int]], pieces: Sequence[Piece]) -> Drafted:
        batch, tokens = self._batch(prompts, pieces)
        attention = self.attention.begin_step(batch)[self.spec.draft_group]
        before = torch.cat([self.features[piece.line][piece.start : piece.end] for piece in pieces])
        return self.head.forward(tokens, torch.from_numpy(batch.positions()), before, attention)

    @torch.inference_mode()
    def logits(self, drafted: Drafted) -> Tensor:
        return self.head.logits(drafted.normed)

    @torch.inference_mode()
    def guesses(self, drafted: Drafted) -> list[int]:
        guesses: list[int] = self.head.guesses(drafted.normed).tolist()
        return guesses

    @staticmethod
    def _batch(prompts: Sequence[Sequence[int]], pieces: Sequence[Piece]) -> tuple[Batch, Tensor]:
        queries = tuple(Query(piece.line, piece.start, piece.end - piece.start) for piece in pieces)
        tokens = [token for piece in pieces for token in prompts[piece.line][piece.start : piece.end]]
        return Batch(queries, 64), torch.tensor(tokens)


def drafted(world: World, prompts: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[list[int]]]:
    """Two prompts cut at odd places, then guesses behind both of them together.

    Of each prompt the logits [T, guessable] of its tokens, then of the guesses; and the guesses.
    """
    ends = [len(prompt) for prompt in prompts]
    steps = [
        [Piece(0, 0, 37), Piece(1, 0, 3)],
        [Piece(1, 3, 4)],
        [Piece(0, 37, ends[0]), Piece(1, 4, ends[1])],
    ]
    logits: list[list[Tensor]] = [[], []]
    last = Drafted(torch.empty(0), torch.empty(0))
    for pieces in steps:
        last = world.compute(prompts, pieces)
        for piece, part in zip(pieces, torch.split(world.logits(last), [p.end - p.start for p in pieces]), strict=True):
            logits[piece.line].append(part)
    places = torch.tensor([ends[0] - 37 - 1, -1])
    last = Drafted(last.normed[places], last.features[places])
    texts, guesses = [list(prompt) for prompt in prompts], world.guesses(last)
    for count in range(NUM_GUESSES):
        for line, guess in enumerate(guesses):
            texts[line].append(guess)
            # The head's own features stand where the model's would.
            known = world.features[line][: ends[line] + count]
            world.features[line] = torch.cat((known, last.features[line : line + 1]))
        last = world.draft(texts, [Piece(line, ends[line] + count, ends[line] + count + 1) for line in (0, 1)])
        guesses = world.guesses(last)
        for line, part in enumerate(world.logits(last)):
            logits[line].append(part[None])
    return [torch.cat(parts) for parts in logits], [text[end:] for text, end in zip(texts, ends, strict=True)]


# ---------------------------------------------------------------- they agree


@cache
def wanted(tiny_models: Path, name: str) -> tuple[tuple[Tensor, list[int]], ...]:
    """What the dense head guesses for each of the prompts."""
    return tuple(dense_drafted(dense_head(tiny_models, name), prompt) for prompt in prompts())


def prompts() -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(256) for _ in range(length)] for length in (90, 41)]


def check(tiny_models: Path, name: str, collective: Collective, page_size: int, choice: str) -> None:
    path, spec = drafting(tiny_models, name)
    logits, guesses = drafted(World(path, spec, collective, page_size, choice), prompts())
    for line, (want, want_guesses) in enumerate(wanted(tiny_models, name)):
        assert (logits[line] - want).abs().max() <= TOLERANCE
        assert guesses[line] == want_guesses


@pytest.mark.parametrize(("page_size", "choice"), [(1, "auto"), (16, "auto"), (64, "torch")])
@pytest.mark.parametrize("name", HEADS)
def test_guesses_over_pages(tiny_models: Path, name: str, page_size: int, choice: str) -> None:
    check(tiny_models, name, ALONE, page_size, choice)


@pytest.mark.parametrize("name", HEADS)
def test_guesses_of_two_ranks(tiny_models: Path, name: str) -> None:
    wanted(tiny_models, name)
    with ThreadPoolExecutor(2) as threads:
        ranks = ThreadCollective.group(2, 120.0)
        for done in [threads.submit(check, tiny_models, name, rank, 16, "auto") for rank in ranks]:
            done.result()


# ---------------------------------------------------------------- what a head is made of


def copied(source: Path, target: Path, **fields: Any) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_one_more_page_group_of_the_lifetime_of_the_model_s_own(tiny_models: Path) -> None:
    expected = {
        "deepseek_v3_mtp": ["latent", "draft"],
        "qwen3_next_mtp": ["kv", "draft", "conv", "ssm"],
        "qwen3_5_mtp": ["kv", "draft", "conv", "ssm"],
        "qwen3_5_moe_mtp": ["kv", "draft", "conv", "ssm"],
        EAGLE3_HEAD: ["kv", "draft"],
    }
    for name in HEADS:
        path, spec = drafting(tiny_models, name)
        cache_spec = spec.cache_spec(16, DType.BFLOAT16)
        assert spec.draft is not None
        names = [group.name for group in cache_spec.groups]
        assert names == [spec.draft.group if group == "draft" else group for group in expected[name]]
        own, draft = cache_spec.groups[0], cache_spec.groups[spec.draft_group]
        assert (draft.retention, cache_spec.pool_of(draft)) == (KEEP_ALL, cache_spec.pool_of(own))
        assert isinstance(own, PageGroup)
        assert isinstance(draft, PageGroup)
        if name == EAGLE3_HEAD:
            assert (own.num_kv_heads, draft.num_kv_heads, draft.head_dim) == (4, 2, 32)
        else:
            assert draft == replace(own, name="draft", num_layers=1, is_for_guesses=True)
        plain = load_spec(path).cache_spec(16, DType.BFLOAT16)
        assert plain.groups == tuple(group for group in cache_spec.groups if group is not draft)


def test_a_head_that_nobody_asks_for_is_named_and_costs_nothing(
    tiny_models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, spec = drafting(tiny_models, "qwen3_next_mtp")
    plain = load_spec(path)
    assert load_weights(path, plain, torch.float32, CPU).draft is None
    assert "tensors of the files are not used: mtp.fc.weight" in caplog.text
    caplog.clear()
    assert load_weights(path, spec, torch.float32, CPU).draft is not None
    assert not caplog.records
    assert rank_weight_bytes(spec, DType.FLOAT32, Shard()) > rank_weight_bytes(plain, DType.FLOAT32, Shard())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", HEADS)
def test_ranks_hold_the_head_together(tiny_models: Path, name: str, size: int) -> None:
    """Every element once, or on each rank, or on each that has the same KV head; and it is counted."""
    _, spec = drafting(tiny_models, name)
    assert spec.draft is not None
    parts = draft_parts(spec.draft)
    seen = {part: torch.zeros(value.shape, dtype=torch.int32) for part, value in parts.items()}
    for rank in range(size):
        shard = Shard(rank, size)
        targets = (allocate_draft if spec.draft.folder else _allocate_with(spec))(
            spec.draft, torch.float32, torch.device("meta"), shard
        )[1]
        num_values = 0
        for part, value in parts.items():
            for source, target in value.pieces(shard):
                seen[part][source] += 1
                shape, filled = seen[part][source].shape, targets[part][target].shape
                assert filled[len(filled) - len(shape) :] == shape, part
                num_values += shape.numel() if value.covers == (part,) else 0
        plain = replace(spec, draft=None)
        counted = (rank_weight_bytes(of, DType.FLOAT32, shard) for of in (spec, plain))
        assert next(counted) - next(counted) == 4 * num_values
    for part, times in seen.items():
        assert times.min() == times.max(), part
        assert times.max() in (1, size, size // spec.draft.layer.num_kv_heads), part


def _allocate_with(spec: ModelSpec) -> Callable[..., tuple[object, dict[str, Tensor]]]:
    return lambda draft, dtype, device, shard: allocate(spec, dtype, device, shard)


def test_a_head_in_a_folder_is_rounded_where_codes_are_computed(tiny_models: Path) -> None:
    """Its guesses are verified, so they need not be exact."""
    path, spec = drafting(tiny_models, EAGLE3_HEAD)
    asked: tuple[Quantization, ...] = ("none", "auto")
    found = {how: load_weights(path, spec, torch.float32, CPU, quantization=how) for how in asked}
    exact, rounded = found["none"].draft, found["auto"].draft
    assert exact is not None
    assert rounded is not None
    assert isinstance(exact.lm_head, Tensor)
    assert isinstance(rounded.lm_head, BlockMatrix)
    assert rounded.lm_head.rounds_inputs
    assert isinstance(found["auto"].lm_head, Tensor), "the model is not"
    counted = {how: rank_weight_bytes(spec, DType.FLOAT32, Shard(), rules=CODE_RULES[how]) for how in found}
    assert counted["none"] - counted["auto"] > 4 * exact.lm_head.numel() - rounded.lm_head.num_bytes


def without(folder: Path, *names: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_error(path: Path, spec: ModelSpec) -> str:
    with pytest.raises(ConfigError) as caught:
        load_weights(path, spec, torch.float32, CPU)
    return str(caught.value)


def test_a_head_that_is_asked_for_and_not_there(tiny_models: Path, tmp_path: Path) -> None:
    for name in ("qwen3_next", "deepseek_v3"):
        path = copied(tiny_models / f"{name}_mtp", tmp_path / name)
        first = "mtp.pre_fc_norm_hidden.weight" if name == "qwen3_next" else "model.layers.3.hnorm.weight"
        without(path, first)
        spec = with_head(load_spec(path), path, "EAGLE", None)
        assert f"1 tensors are missing, first {first.removeprefix('model.')}" in load_error(path, spec)
    path = tiny_models / "qwen3_5_text"
    assert "tensors are missing, first mtp.fc.weight" in load_error(
        path, with_head(load_spec(path), path, "EAGLE", None)
    )
    path = tiny_models / "llama"
    with pytest.raises(ConfigError, match="models of llama bring no head that drafts tokens"):
        with_head(load_spec(path), path, "EAGLE", None)


def test_what_an_eagle3_folder_lacks_is_named(tiny_models: Path, tmp_path: Path) -> None:
    model, head = tiny_models / EAGLE3_MODEL, copied(tiny_models / EAGLE3_HEAD, tmp_path / "head")
    without(head, "d2t", "midlayer.hidden_norm.weight")
    message = load_error(model, with_head(load_spec(model), model, "EAGLE", head))
    assert "2 tensors are missing, first d2t" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures is .*, expected \[LlamaForCausalLMEagle3\]"),
        ({"vocab_size": 300}, "vocab_size is 300, expected the model's 272"),
        ({"hidden_size": 32}, "hidden_size is 32, expected the model's 64"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128, expected the model's 64"),
        (
            {"hidden_size": 32, "target_hidden_size": 64},
            "hidden_size is 32, expected the model's 64 where the head has no embedding of its own",
        ),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, expected 1"),
        ({"norm_before_residual": True}, "norm_before_residual is True, expected false"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False, expected true"),
        ({"eagle_config": None}, "would read what enters layers 1, 2, 2, expected 3 of the model's 4"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "what enters layers 1, 2, 4, expected 3"),
    ],
)
def test_an_eagle3_head_of_another_model(
    tiny_models: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    model, head = tiny_models / EAGLE3_MODEL, copied(tiny_models / EAGLE3_HEAD, tmp_path / "head", **fields)
    with pytest.raises(ConfigError, match=f"^draft model head: .*{message}"):
        with_head(load_spec(model), model, "EAGLE", head)


def test_the_layers_an_eagle3_head_reads_as_vllm_names_them(tiny_models: Path, tmp_path: Path) -> None:
    named = {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [3, 0, 1]}
    model, head = tiny_models / EAGLE3_MODEL, copied(tiny_models / EAGLE3_HEAD, tmp_path / "head", **named)
    spec = with_head(load_spec(model), model, "EAGLE", head)
    assert spec.draft is not None
    assert spec.draft.read_layers == (0, 1, 3)


def test_an_eagle3_head_with_an_embedding_and_all_tokens_of_its_own(tiny_models: Path, tmp_path: Path) -> None:
    """A head may have another hidden size than its model; heads that do not divide over ranks are refused by name."""
    head = copied(
        tiny_models / EAGLE3_HEAD, tmp_path / "head", hidden_size=32, target_hidden_size=64, draft_vocab_size=None
    )
    tensors = load_file(head / "model.safetensors")
    sizes = {
        "fc.weight": (32, 192),
        "lm_head.weight": (272, 32),
        "embed_tokens.weight": (272, 32),
        "midlayer.self_attn.o_proj.weight": (32, 128),
        "midlayer.mlp.gate_proj.weight": (80, 32),
        "midlayer.mlp.up_proj.weight": (80, 32),
        "midlayer.mlp.down_proj.weight": (32, 80),
        **{f"midlayer.self_attn.{kind}_proj.weight": (rows, 64) for kind, rows in (("q", 128), ("k", 64), ("v", 64))},
        **{name: (32,) for name in tensors if "norm" in name},
    }
    generator = torch.Generator().manual_seed(0)
    tensors |= {f"model.{name}": torch.randn(size, generator=generator) for name, size in sizes.items()}
    kept = {name: value for name, value in tensors.items() if name.startswith("model.") or name in ("d2t", "t2d")}
    save_file(kept, head / "model.safetensors")
    path = tiny_models / EAGLE3_MODEL
    spec = with_head(load_spec(path), path, "EAGLE", head)
    world = World(path, spec, ALONE, 16, "auto")
    logits, guesses = drafted(world, prompts())
    assert [part.shape for part in logits] == [(93, 272), (44, 272)]
    assert all(0 <= guess < 272 for of_prompt in guesses for guess in of_prompt)
    with pytest.raises(ConfigError, match="num_attention_heads is 4, which does not divide over 8"):
        spec.local(Shard(0, 8))
