"""What `serve` writes for the processes it starts."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Role
from deltaserve.launch.compose import Checkpoint
from deltaserve.launch.serve import (
    by_config,
    compose,
    describe_groups,
    describe_staging,
    prepare,
    tell_native,
    tell_pair,
    tell_resolved,
    tell_sampling,
)
from deltaserve.process.front.front_spec import FrontSpec
from deltaserve.process.worker.worker_spec import read_spec
from deltaserve.settings.config import Settings
from deltaserve.settings.resolve import StepSizes
from tests.layer_parts import moe_of
from tests.ports import free_port


def test_no_worker_is_told_where_to_listen_and_the_front_not_where_to_look(tiny_models: Path, tmp_path: Path) -> None:
    """A port chosen before its owner listens there may be given to somebody else meanwhile."""
    settings = {
        "model": {"model_path": str(tiny_models / "llama"), "device": "cpu"},
        "network": {"port": free_port()},
        "disaggregation": {"prefill": 2},
    }
    cluster = compose(Settings.model_validate(settings), tmp_path)
    front = msgspec.json.decode((tmp_path / "front.json").read_bytes(), type=FrontSpec)
    names = ["prefill-0", "prefill-1", "decode-0"]
    assert [child.name for child in cluster.children] == [*names, "front"]
    assert [(worker.name, worker.url) for worker in front.workers] == [(name, None) for name in names]
    assert {read_spec(tmp_path / f"{name}.json").port for name in names} == {0}


def test_a_pool_that_shortens_the_context_is_warned_of_with_both_lengths(tiny_models: Path) -> None:
    said: list[str] = []
    settings = Settings.model_validate(
        {
            "model": {"model_path": str(tiny_models / "llama"), "device": "cpu"},
            "memory": {"num_pages": 4, "page_size": 16},
        }
    )
    resolved = prepare(settings).resolved[Role.DECODE]
    tell_resolved(resolved, lambda line: said.append(str(line)))
    assert said[-1].startswith(f"warning: context 64 instead of the model's {resolved.shortened_from}: 4 pages of 16")
    said.clear()
    enough = settings.model_copy(update={"memory": settings.memory.model_copy(update={"num_pages": 4096})})
    tell_resolved(prepare(enough).resolved[Role.DECODE], lambda line: said.append(str(line)))
    assert len(said) == 1


@pytest.mark.parametrize(
    ("given", "source", "words"),
    [
        ({}, "model", None),
        ({"temperature": 0.6, "top_k": 20}, "model", "temperature 0.6, top_k 20 (--sampling-defaults openai"),
        ({"temperature": 0.6, "top_k": 20}, "openai", None),
    ],
)
def test_sampling_that_a_request_need_not_ask_for_is_told(
    tiny_models: Path, tmp_path: Path, given: dict[str, float], source: str, words: str | None
) -> None:
    """By the terminal and, to the front, by its spec; plain probabilities need no line."""
    model = tmp_path / "model"
    shutil.copytree(tiny_models / "llama", model)
    (model / "generation_config.json").write_text(json.dumps(given))
    settings = {
        "model": {"model_path": str(model), "device": "cpu", "sampling_defaults": source},
        "network": {"port": free_port()},
    }
    cluster, said = compose(Settings.model_validate(settings), tmp_path), list[str]()
    tell_sampling(cluster.sampling, lambda line: said.append(str(line)))
    assert len(said) == (words is not None)
    assert words is None or words in said[0]
    front = msgspec.json.decode((tmp_path / "front.json").read_bytes(), type=FrontSpec)
    assert front.sampling_defaults == source


def test_missing_native_kernels_are_told_once_for_all_workers(tiny_models: Path) -> None:
    settings = Settings.model_validate({"model": {"model_path": str(tiny_models / "llama"), "device": "cpu"}})
    lacking = [replace(config, native_problem="not compiled") for config in prepare(settings).resolved.values()]
    said: list[str] = []
    tell_native(lacking, lambda line: said.append(str(line)))
    tell_native([replace(config, native_problem=None) for config in lacking], lambda line: said.append(str(line)))
    assert said == ["warning: no native kernels, torch computes in their place, more slowly: not compiled"]


def test_the_line_at_the_start_names_the_pages_of_each_pool(tiny_models: Path) -> None:
    said: list[str] = []
    settings = Settings.model_validate(
        {
            "model": {"model_path": str(tiny_models / "gemma3_text"), "device": "cpu"},
            "memory": {"num_pages": 4096, "page_size": 16},
            "scheduling": {"max_running_requests": 2, "chunked_prefill_size": 64},
        }
    )
    resolved = prepare(settings).resolved[Role.DECODE]
    tell_resolved(resolved, lambda line: said.append(str(line)))
    full, window = resolved.num_pages
    assert (full, window) == (4096, 4096 * 3 // 64)  # a tail of 3 pages for each prefix of a quarter of the context
    assert f"{full} pages (32.0 MiB) and {window} of the last 24 tokens (4.5 MiB) per worker (36.5 MiB)" in said[0]


def of_ranks(model: Path, **parallelism: object) -> Settings:
    return Settings.model_validate(
        {
            "model": {"model_path": str(model), "device": "cpu"},
            "memory": {"num_pages": 8, "page_size": 16},
            "parallelism": parallelism,
        }
    )


def test_workers_of_several_ranks_are_told_of_and_hold_a_part_of_each_page(tiny_models: Path) -> None:
    resolved = prepare(of_ranks(tiny_models / "llama", decode_tp_size=2)).resolved
    prefill, decode = resolved[Role.PREFILL], resolved[Role.DECODE]
    assert (prefill.tp_size, decode.tp_size) == (1, 2)
    assert prefill.kv_bytes == 2 * decode.kv_bytes
    assert prefill.num_pages == decode.num_pages
    said: list[str] = []
    for who, config in by_config(resolved):
        tell_resolved(config, lambda line: said.append(str(line)), who)
    lines = [line for line in said if "warning" not in line]
    assert [line.split(":")[0] for line in lines] == ["prefill", "decode"]
    assert ["2 ranks per worker" in line for line in lines] == [False, True]
    (alike,) = by_config(prepare(of_ranks(tiny_models / "llama", tp_size=2)).resolved)
    assert alike[0] == ""


def unlike(model: Path, staging: str = "off", **memory: object) -> Settings:
    return Settings.model_validate(
        {
            "model": {"model_path": str(model), "device": "cpu"},
            "memory": {"num_pages": 64, "page_size": 16, **memory},
            "disaggregation": {"staging": staging},
        }
    )


@pytest.mark.parametrize(("staging", "words"), [("off", "a write for each row"), ("auto", "by way of staging memory")])
def test_page_sizes_of_the_two_sides_are_told_and_how_pages_move(tiny_models: Path, staging: str, words: str) -> None:
    settings = unlike(tiny_models / "llama", staging, decode_page_size=64)
    resolved = prepare(settings).resolved
    assert [resolved[role].page_size for role in (Role.PREFILL, Role.DECODE)] == [16, 64]
    said: list[str] = []
    tell_pair(settings, resolved, lambda line: said.append(str(line)))
    (line,) = said
    assert "prefill's pages (16 tokens, float32) are unlike decode's (64 tokens, float32)" in line
    assert words in line
    said.clear()
    tell_pair(settings, prepare(unlike(tiny_models / "llama", staging)).resolved, lambda line: said.append(str(line)))
    assert said == []


def test_unequal_dtypes_of_kv_need_staging(tiny_models: Path) -> None:
    dtypes = {"prefill_kv_cache_dtype": "float32", "decode_kv_cache_dtype": "fp8_e4m3"}
    with pytest.raises(ConfigError, match=r"KV is float32 on prefill and fp8_e4m3 on decode: .* --staging auto"):
        prepare(unlike(tiny_models / "llama", **dtypes))
    resolved = prepare(unlike(tiny_models / "llama", "auto", **dtypes)).resolved
    assert resolved[Role.PREFILL].kv_bytes == 4 * resolved[Role.DECODE].kv_bytes


def test_a_chunk_is_whole_pages_of_its_own_worker(tiny_models: Path) -> None:
    settings = unlike(tiny_models / "llama", prefill_page_size=64)
    scheduling = settings.scheduling.model_copy(update={"chunked_prefill_size": 32})
    with pytest.raises(ConfigError, match="--chunked-prefill-size 32: must be a multiple of the page size 64"):
        prepare(settings.model_copy(update={"scheduling": scheduling}))


def test_workers_of_both_roles_take_requests_of_one_length(tiny_models: Path) -> None:
    settings = of_ranks(tiny_models / "llama", decode_tp_size=2)
    settings = settings.model_copy(update={"memory": settings.memory.model_copy(update={"num_pages": "auto"})})
    resolved = prepare(settings).resolved
    assert len({config.context_len for config in resolved.values()}) == 1


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        ({"tp_size": 3}, "--tp-size 3: num_key_value_heads is 4, which does not divide over 3 tensor-parallel ranks"),
        (
            {"tp_size": 2, "decode_tp_size": 16},
            "--decode-tp-size 16: num_attention_heads is 8, which does not divide over",
        ),
        ({"tp_size": 2, "ep_size": 2}, "--ep-size 2: this model has no experts"),
        ({"prefill_tp_size": 16}, "--prefill-tp-size 16: num_attention_heads is 8, which does not divide over 16"),
    ],
)
def test_ranks_over_which_the_model_does_not_divide_are_refused_at_once(
    tiny_models: Path, parallelism: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare(of_ranks(tiny_models / "llama", **parallelism))


def test_the_memory_for_staging_is_told(tiny_models: Path) -> None:
    settings = unlike(tiny_models / "llama", "on")
    assert describe_staging(settings) == "staging memory: 64 MiB on each rank, half to send and half to receive (on)"


def in_groups(model: Path, dp_size: int, **parallelism: int) -> Settings:
    return of_ranks(model, dp_size=dp_size, enable_dp_attention=True, **parallelism)


def test_prefill_workers_that_share_experts_are_made_as_groups(tiny_models: Path, tmp_path: Path) -> None:
    settings = in_groups(tiny_models / "qwen3_moe", 1, prefill_dp_size=2)
    [line] = describe_groups(settings)
    assert line.startswith("prefill: 2 workers that share experts; each step")
    children = {child.name: child for child in compose(settings, tmp_path).children}
    assert children["prefill-0"].group == children["prefill-1"].group is not None
    assert children["decode-0"].group is None
    seats = [read_spec(Path(children[f"prefill-{i}"].argv[-1])).expert_seat for i in range(2)]
    assert [(seat.member, seat.size) for seat in seats if seat is not None] == [(0, 2), (1, 2)]
    both = in_groups(tiny_models / "qwen3_moe", 4, prefill_dp_size=2)
    points = {child.group for child in compose(both, tmp_path).children}
    assert len(points - {None}) == 2


def test_decode_workers_that_share_experts_are_made_as_groups(tiny_models: Path, tmp_path: Path) -> None:
    settings = in_groups(tiny_models / "qwen3_moe", 2, prefill_tp_size=2)
    disaggregation = settings.disaggregation.model_copy(update={"decode": 2})
    settings = settings.model_copy(update={"disaggregation": disaggregation})
    [line] = describe_groups(settings)
    assert line.startswith("decode: 2 workers that share experts, 2 times; each step is one of all 2")
    children = {child.name: child for child in compose(settings, tmp_path).children}
    assert [name for name in children if name.startswith("decode")] == [f"decode-{i}" for i in range(4)]
    groups = [children[f"decode-{i}"].group for i in range(4)]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert (children["prefill-0"].group, children["front"].group) == (None, None)
    seats = [read_spec(Path(children[f"decode-{i}"].argv[-1])).expert_seat for i in range(4)]
    assert [None if seat is None else (seat.member, seat.size) for seat in seats] == [(0, 2), (1, 2)] * 2
    assert [None if seat is None else seat.meeting_point for seat in seats] == groups


def test_a_member_is_planned_with_its_part_of_the_experts(tiny_models: Path) -> None:
    checkpoint = Checkpoint.open(str(tiny_models / "qwen3_moe"))
    whole, part = (checkpoint.facts(num_members=size).weight_bytes("float32", "auto", "cpu") for size in (1, 4))
    spec = checkpoint.spec
    moe = moe_of(spec)
    experts = 3 * moe.intermediate_size * spec.hidden_size * moe.num_experts * spec.num_layers * 4
    assert whole - part == experts * 3 // 4


def test_recorded_steps_are_planned_where_nobody_else_takes_part(tiny_models: Path) -> None:
    checkpoint = Checkpoint.open(str(tiny_models / "qwen3_moe"))
    sizes = StepSizes("cuda", max_rows=8, step_len=64, context_len=512, split_tokens=32, page_size=16)
    for tp_size, num_members, is_recorded in ((1, 1, True), (2, 1, False), (1, 4, False)):
        scratch = checkpoint.facts(tp_size, num_members=num_members).scratch_bytes
        assert (scratch(sizes) > scratch(replace(sizes, may_record=False))) is is_recorded


def test_a_tied_embedding_is_planned_once_for_a_gpu(tiny_models: Path) -> None:
    checkpoint = Checkpoint.open(str(tiny_models / "qwen3"))
    assert checkpoint.stored.tied_embeddings
    on_cpu, on_gpu = (checkpoint.facts().weight_bytes("float32", "none", device) for device in ("cpu", "cuda"))
    assert on_cpu - on_gpu == checkpoint.spec.vocab_size * checkpoint.spec.hidden_size * 4


@pytest.mark.parametrize(
    ("name", "dp_size", "message"),
    [
        ("qwen3_moe", 3, "--dp-size 3: 8 experts do not divide over so many workers"),
        ("llama", 2, "--dp-size 2: this model has no experts"),
    ],
)
def test_groups_that_cannot_be_are_refused_at_once(tiny_models: Path, name: str, dp_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(in_groups(tiny_models / name, dp_size))


@pytest.mark.parametrize(
    ("disaggregation", "words"),
    [
        ({}, "pages move by local"),
        ({"disaggregation_transfer_backend": "nixl"}, "pages move by nixl over tcp,self"),
        ({"disaggregation_transfer_backend": "mooncake"}, "pages move by mooncake over tcp"),
        ({"disaggregation_mode": "null"}, "no pages move (--disaggregation-mode null)"),
    ],
)
def test_the_line_at_the_start_names_what_moves_pages(
    tiny_models: Path, disaggregation: dict[str, str], words: str
) -> None:
    settings = {"model": {"model_path": str(tiny_models / "llama"), "device": "cpu"}, "disaggregation": disaggregation}
    said: list[str] = []
    for who, config in by_config(prepare(Settings.model_validate(settings)).resolved):
        tell_resolved(config, lambda line: said.append(str(line)), who)
    assert said[0].endswith(words)
