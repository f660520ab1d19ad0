"""resolve(): "auto" becomes numbers that fit the model and the machine, or one line says why not."""

import dataclasses
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.compute.attention.registry import attention_kinds
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Role
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.launch.compose import transport_facts
from deltaserve.settings.config import Settings
from deltaserve.settings.resolve import (
    MachineFacts,
    ModelFacts,
    PoolFacts,
    ResolvedConfig,
    StepSizes,
    TransportFacts,
    kv_bytes_per_token,
    of_one_context,
    resolve,
)
from deltaserve.transports.local import kind as local_kind

MIB = 1 << 20
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}


def one_pool(page_size: int, kv_dtype: str) -> tuple[PoolFacts, ...]:
    return (PoolFacts(page_size * 1024 * ITEMSIZE[kv_dtype], KEEP_ALL),)


def three_pools(page_size: int, kv_dtype: str) -> tuple[PoolFacts, ...]:
    page_bytes = page_size * 3072 * ITEMSIZE[kv_dtype]
    window = PoolFacts(page_bytes, Retention(Lifetime.WINDOW, 1024))
    return (*one_pool(page_size, kv_dtype), window, PoolFacts(page_bytes, Retention(Lifetime.STATE)))


MODEL = ModelFacts(
    dtype="bfloat16",
    weight_bytes=lambda dtype, quantization, device: (
        100 * MIB * ITEMSIZE[dtype] // (4 if quantization == "int8" else 1)
    ),
    context_len=32_768,
    pools=one_pool,
    scratch_bytes=lambda sizes: sizes.max_rows * MIB,
)


def machine_of(**facts: Any) -> MachineFacts:
    """Facts of a worker that may have peers elsewhere."""
    return MachineFacts(**{"transports": transport_facts(), "attention": attention_kinds(), **facts})


MACHINE = machine_of(device="cpu", num_cores=8, free_bytes=4096 * MIB)
CUDA = machine_of(device="cuda", num_cores=8, free_bytes=8192 * MIB)


def settings(**groups: dict[str, Any]) -> Settings:
    """Pages of 64 tokens unless told."""
    return Settings.model_validate({**groups, "memory": {"page_size": 64, **groups.get("memory", {})}})


def resolved(facts: ModelFacts = MODEL, machine: MachineFacts = MACHINE, **groups: dict[str, Any]) -> ResolvedConfig:
    return resolve(settings(**groups), facts, machine)


@pytest.mark.parametrize(
    ("machine", "asked", "may"), [(CUDA, False, True), (CUDA, True, False), (MACHINE, False, False)]
)
def test_memory_of_recorded_steps_is_planned_where_there_may_be_some(
    machine: MachineFacts, asked: bool, may: bool
) -> None:
    found: list[bool] = []

    def scratch(sizes: StepSizes) -> int:
        found.append(sizes.may_record)
        return MIB

    resolved(replace(MODEL, scratch_bytes=scratch), machine, scheduling={"disable_cuda_graph": asked})
    assert found == [may]


def test_defaults_on_a_cpu() -> None:
    config = resolve(Settings(), MODEL, MACHINE)
    assert (config.device, config.dtype, config.kv_cache_dtype, config.page_size) == ("cpu", "bfloat16", "bfloat16", 16)
    assert (config.max_running_requests, config.chunk_len, config.step_len, config.num_threads) == (32, 512, 512, 7)
    budget = int(4096 * MIB * 0.4) - 200 * MIB - 32 * MIB  # weights, and what a step of 32 rows needs
    assert config.num_pages == (budget // (16 * 2048),)
    assert config.kv_bytes == config.num_pages[0] * 16 * 2048 <= budget
    assert config.context_len == 32_768


def test_defaults_on_cuda() -> None:
    config = resolve(Settings(), MODEL, machine_of(device="cuda", num_cores=8, free_bytes=80_000 * MIB))
    assert (config.device, config.max_running_requests, config.chunk_len) == ("cuda", 256, 8192)
    assert config.page_size == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_type_that_the_cpu_multiplies_slowly_is_kept_in_float32(dtype: str) -> None:
    slow = dataclasses.replace(MACHINE, slow_dtypes=frozenset({dtype}))
    model = dataclasses.replace(MODEL, dtype=dtype)
    narrow, wide = resolved(model), resolved(model, slow)
    assert (narrow.dtype, narrow.kv_cache_dtype, narrow.widened_from) == (dtype, dtype, None)
    assert (wide.dtype, wide.kv_cache_dtype, wide.widened_from) == ("float32", "float32", dtype)
    assert wide.kv_bytes <= int(4096 * MIB * 0.4) - MODEL.weight_bytes("float32", "auto", "cpu") - 32 * MIB


def test_matrices_are_codes_where_the_native_library_computes() -> None:
    cuda = machine_of(device="cuda", num_cores=8, free_bytes=80_000 * MIB)
    missing = dataclasses.replace(MACHINE, native_problem="not compiled")
    coded = dataclasses.replace(MODEL, has_codes=True)
    assert resolved(coded).quantization == "auto"
    assert resolved().quantization == "none"
    assert resolved(coded, model={"quantization": "none"}).quantization == "none"
    without = (
        resolved(coded, machine=cuda),
        resolved(coded, machine=missing),
        resolved(coded, scheduling={"attention_backend": "torch"}),
        resolved(coded, model={"dtype": "float16"}),
    )
    assert {config.quantization for config in without} == {"none"}
    small = resolved(model={"quantization": "int8"})
    assert small.kv_bytes > resolved().kv_bytes
    assert MODEL.weight_bytes("bfloat16", "int8", "cpu") == 50 * MIB


@pytest.mark.parametrize(("backend", "told"), [("auto", "not compiled"), ("torch", None), ("native", None)])
def test_a_missing_native_library_is_told_where_nobody_chose(backend: str, told: str | None) -> None:
    missing = dataclasses.replace(MACHINE, native_problem="not compiled")
    assert resolved(machine=missing, scheduling={"attention_backend": backend}).native_problem == told


@pytest.mark.parametrize(
    ("machine", "groups", "why"),
    [
        (machine_of(device="cuda", num_cores=8, free_bytes=80_000 * MIB), {}, "CPUs only, and the device is cuda"),
        (dataclasses.replace(MACHINE, native_problem="not compiled"), {}, "the native library: not compiled"),
        (MACHINE, {"scheduling": {"attention_backend": "torch"}}, "which --attention-backend torch leaves out"),
        (MACHINE, {"model": {"dtype": "float16"}}, "float32 or bfloat16, and --dtype is float16"),
    ],
)
def test_codes_that_were_asked_for_and_cannot_be_had(machine: MachineFacts, groups: dict[str, Any], why: str) -> None:
    model = {**groups.get("model", {}), "quantization": "a8"}
    with pytest.raises(ConfigError, match=f"--quantization a8: .*{why}"):
        resolved(machine=machine, **{**groups, "model": model})


@pytest.mark.parametrize(
    ("device", "model", "memory", "why"),
    [
        ("cpu", {}, {}, "it computes on GPUs, and the device is cpu"),
        ("cuda", {"dtype": "float32"}, {}, "float16 and bfloat16, and --dtype is float32"),
        ("cuda", {"dtype": "float16"}, {"kv_cache_dtype": "bfloat16"}, "--dtype, here float16, or fp8_e4m3, and is bf"),
        ("cuda", {}, {"kv_cache_dtype": "float32"}, "--dtype, here bfloat16, or fp8_e4m3, and is float32"),
    ],
)
def test_flashinfer_for_what_it_does_not_compute(
    device: Literal["cpu", "cuda"], model: dict[str, str], memory: dict[str, str], why: str
) -> None:
    machine = machine_of(device=device, num_cores=8, free_bytes=80_000 * MIB)
    flashinfer = {"attention_backend": "flashinfer"}
    with pytest.raises(ConfigError, match=f"--attention-backend flashinfer: .*{why}"):
        resolved(machine=machine, scheduling=flashinfer, model=model, memory=memory)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8_e4m3"])
def test_flashinfer_on_gpus(kv_cache_dtype: str) -> None:
    cuda = machine_of(device="cuda", num_cores=8, free_bytes=80_000 * MIB)
    coded = dataclasses.replace(MODEL, has_codes=True)
    flashinfer = {"attention_backend": "flashinfer"}
    found = resolved(coded, cuda, scheduling=flashinfer, memory={"kv_cache_dtype": kv_cache_dtype})
    assert (found.dtype, found.quantization) == ("bfloat16", "none")


def test_a_slow_type_that_was_asked_for_is_used() -> None:
    slow = dataclasses.replace(MACHINE, slow_dtypes=frozenset({"bfloat16"}))
    asked = resolved(MODEL, slow, model={"dtype": "bfloat16"})
    assert (asked.dtype, asked.kv_cache_dtype, asked.widened_from) == ("bfloat16", "bfloat16", None)
    kv = resolved(MODEL, slow, memory={"kv_cache_dtype": "bfloat16"})
    assert (kv.dtype, kv.kv_cache_dtype, kv.widened_from) == ("float32", "bfloat16", "bfloat16")
    assert resolved(dataclasses.replace(MODEL, dtype="float32"), slow).widened_from is None


def test_workers_of_one_machine_share_cores_and_memory() -> None:
    alone, shared = resolved(), resolved(machine=dataclasses.replace(MACHINE, num_ranks=3))
    assert shared.num_threads == 2
    assert shared.num_pages[0] < alone.num_pages[0] // 3


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "num_threads"),
    [
        (1, 1, 1),
        (2, 1, 2),
        (2, 2, 1),
        (3, 1, 3),
        (4, 1, 3),
        (4, 2, 1),
        (8, 1, 7),
        (8, 2, 3),
        (64, 2, 31),
        (2, 5, 1),
        (64, 100, 1),
    ],
)
def test_threads_leave_a_core_to_the_rest_of_the_machine(num_cores: int, num_ranks: int, num_threads: int) -> None:
    """Where cores are many; fewer compute where they have to wait for one."""
    machine = dataclasses.replace(MACHINE, num_cores=num_cores, num_ranks=num_ranks, free_bytes=1 << 40)
    found, asked = resolved(machine=machine), resolved(machine=machine, scheduling={"num_threads": 5})
    assert (found.least_threads, found.num_threads) == (1, num_threads)
    assert (asked.least_threads, asked.num_threads) == (5, 5)


@pytest.mark.parametrize(
    ("facts", "scheduling", "threads"),
    [
        ({}, {}, (1, 10, 15)),
        ({"num_cores": 2}, {}, (1, 1, 2)),
        ({"lends_cores": False}, {}, (1, 10, 10)),
        ({"counts_waits": False}, {}, (1, 10, 10)),
        ({"native_problem": "not compiled"}, {}, (1, 10, 10)),
        ({}, {"num_threads": 4}, (4, 4, 4)),
        ({}, {"attention_backend": "torch"}, (1, 10, 10)),
    ],
)
def test_cores_that_no_other_worker_needs_are_borrowed(
    facts: dict[str, Any], scheduling: dict[str, object], threads: tuple[int, int, int]
) -> None:
    """Not where somebody said how many threads there are, or nobody would know that they wait."""
    pair = dataclasses.replace(MACHINE, num_cores=16, num_ranks=2, core_shares=(2, 3), free_bytes=1 << 40)
    machine = dataclasses.replace(pair, **{"lends_cores": True, **facts})
    found = resolved(machine=machine, scheduling=scheduling)
    assert (found.least_threads, found.own_threads, found.num_threads) == threads


def test_ranks_of_a_worker_keep_their_number_of_threads() -> None:
    model, machine = dataclasses.replace(MODEL, tp_size=2), dataclasses.replace(MACHINE, num_cores=16, num_ranks=2)
    found = resolved(model, machine)
    assert (found.least_threads, found.num_threads) == (7, 7)


def test_where_nobody_counts_how_long_threads_wait_few_cores_have_one() -> None:
    blind = dataclasses.replace(MACHINE, num_cores=2, counts_waits=False)
    assert resolved(machine=blind).num_threads == 1
    assert resolved(machine=dataclasses.replace(blind, num_cores=8)).num_threads == 7


@pytest.mark.parametrize(
    ("num_cores", "share", "num_threads"), [(16, 2, 10), (16, 1, 5), (4, 2, 2), (4, 1, 1), (2, 2, 1), (2, 1, 1)]
)
def test_threads_are_divided_by_role(num_cores: int, share: int, num_threads: int) -> None:
    machine = dataclasses.replace(MACHINE, num_cores=num_cores, num_ranks=2, core_shares=(share, 3), free_bytes=1 << 40)
    assert resolved(machine=machine).num_threads == num_threads


@pytest.mark.parametrize("free_bytes", [1024 * MIB, 4096 * MIB, 9001 * MIB])
def test_windows_and_states_get_what_running_requests_hold_and_full_pages_the_rest(free_bytes: int) -> None:
    facts, machine = dataclasses.replace(MODEL, pools=three_pools), dataclasses.replace(MACHINE, free_bytes=free_bytes)
    config = resolved(facts, machine, scheduling={"max_running_requests": 16})
    full, window, states = config.num_pages
    page_bytes = 64 * 2048
    running, tail = 2 * 16 * (-(-(1023 + 512) // 64) + 1), 1024 // 64 + 1
    assert window == min(full, max(running, full * tail // (32768 // 4 // 64)))  # prefixes of 128 pages, and tails
    assert states == min(full, max(4 * 16, full // (32768 // 4 // 64)))  # one for each of those prefixes
    assert config.kv_bytes == (full + 3 * window + 3 * states) * page_bytes
    assert kv_bytes_per_token(settings(), facts) == 2048
    budget = int(free_bytes * 0.4) - 200 * MIB - 16 * MIB
    assert config.kv_bytes <= budget < config.kv_bytes + 7 * page_bytes


def test_an_asked_number_of_pages_is_that_of_the_full_pool() -> None:
    facts = dataclasses.replace(MODEL, pools=three_pools)
    config = resolved(facts, memory={"num_pages": 500}, scheduling={"max_running_requests": 4})
    assert config.num_pages == (500, 200, 16)
    assert resolved(facts, memory={"num_pages": 12}).num_pages == (12, 12, 4)


def with_states(state_bytes: int) -> ModelFacts:
    def pools(page_size: int, kv_dtype: str) -> tuple[PoolFacts, ...]:
        return (*one_pool(page_size, kv_dtype), PoolFacts(state_bytes, Retention(Lifetime.STATE)))

    return dataclasses.replace(MODEL, pools=pools)


def test_states_take_no_more_memory_than_the_pages_beside_them() -> None:
    """One state weighs as much as 3,144 tokens: Qwen3-Next."""
    page_bytes, state_bytes = 64 * 2048, 3144 * 2048
    full, states = resolved(with_states(state_bytes)).num_pages
    assert states == full * page_bytes // state_bytes < 4 * 32
    light_full, light_states = resolved(with_states(page_bytes)).num_pages
    assert light_states == 4 * 32, "as many as are of use"
    assert light_full > full


def test_there_is_a_state_for_each_prefix_that_the_pages_hold() -> None:
    """Where that is more than a few for each row: reuse ends where slots do, however many pages there are."""
    config = resolved(with_states(64 * 2048), scheduling={"max_running_requests": 2}, model={"context_length": 4096})
    full, states = config.num_pages
    assert states == full // (4096 // 4 // 64) > 4 * 2


def test_an_asked_number_of_states_is_had() -> None:
    facts = with_states(3144 * 2048)
    assert resolved(facts, memory={"max_mamba_cache_size": 7}).num_pages[1] == 7
    assert resolved(facts, memory={"max_mamba_cache_size": 7, "num_pages": 500}).num_pages == (500, 7)


def test_a_narrower_cache_holds_more() -> None:
    wide, narrow = resolved(), resolved(memory={"kv_cache_dtype": "fp8_e4m3"})
    assert narrow.kv_cache_dtype == "fp8_e4m3"
    assert wide.num_pages[0] * 2 <= narrow.num_pages[0] <= wide.num_pages[0] * 2 + 1


def test_an_automatic_context_shrinks_to_the_pool_and_an_asked_one_does_not() -> None:
    assert resolved(memory={"num_pages": 10}).context_len == 640
    with pytest.raises(ConfigError, match="--context-length 32768: the pool holds 640 tokens"):
        resolved(memory={"num_pages": 10}, model={"context_length": 32_768})
    assert resolved(memory={"num_pages": 10}, model={"context_length": 640}).context_len == 640


def test_an_automatic_pool_is_no_larger_than_useful() -> None:
    config = resolved(scheduling={"max_running_requests": 1}, model={"context_length": 64})
    assert config.num_pages == (4,)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"model": {"device": "cuda"}}, "--device cuda: no CUDA device is visible here"),
        ({"model": {"context_length": 1}}, "a context of 1 tokens holds no prompt and answer: at least 2"),
        ({"model": {"context_length": 40_000}}, "--context-length 40000: the model was made for at most 32768"),
        ({"model": {"context_length": 40_000}}, "--json-model-override-args '{\"max_position_embeddings\": 40000}'"),
        ({"scheduling": {"chunked_prefill_size": 100}}, "--chunked-prefill-size 100: must be a multiple of the page"),
        ({"scheduling": {"attention_split_tokens": 96}}, "--attention-split-tokens 96: must be a multiple of the page"),
        ({"scheduling": {"max_prefill_tokens": 10}}, "--max-prefill-tokens 10: must be at least the chunk of 512"),
        (
            {"memory": {"mem_fraction_static": 0.01}},
            "41.0 MiB for each of 1 worker processes do not hold 200.0 MiB of weights, 32.0 MiB for a step",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(groups: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(settings(**groups), MODEL, MACHINE)
    assert message in str(caught.value)


TOTAL = dataclasses.replace(MACHINE, num_ranks=2, total_bytes=1000 * MIB)
"""Two workers with 200 MiB of weights and 300 MiB for pages of 128 KiB each."""


def test_a_pool_that_an_empty_machine_could_not_hold_is_refused_with_the_largest_that_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(machine=TOTAL, memory={"num_pages": 1_000_000_000})
    message = str(caught.value)
    assert message.startswith("--num-pages 1000000000: 122070.3 GiB of pages and 200.0 MiB of weights for each of 2 ")
    assert message.endswith("1000.0 MiB of memory here; at most 2400 fit")
    assert resolved(machine=TOTAL, memory={"num_pages": 2400}).num_pages == (2400,)
    with pytest.raises(ConfigError, match=r"--num-pages 2401: .* at most 2400 fit"):
        resolved(machine=TOTAL, memory={"num_pages": 2401})


def test_what_is_free_now_refuses_no_pool_that_was_asked_for() -> None:
    assert resolved(machine=dataclasses.replace(TOTAL, free_bytes=0), memory={"num_pages": 2400}).num_pages == (2400,)


def test_weights_that_an_empty_machine_could_not_hold() -> None:
    with pytest.raises(ConfigError, match="not one page fits beside the weights"):
        resolved(machine=dataclasses.replace(TOTAL, num_ranks=5), memory={"num_pages": 1})


@given(
    page_size=st.sampled_from(["auto", 1, 2, 16, 128]),
    num_pages=st.just("auto") | st.integers(1, 10_000),
    share=st.just("auto") | st.floats(0.05, 0.95),
    running=st.just("auto") | st.integers(1, 1000),
    free=st.integers(600, 100_000),
    num_ranks=st.integers(1, 4),
)
def test_whatever_resolves_is_consistent(
    page_size: Any, num_pages: Any, share: Any, running: Any, free: int, num_ranks: int
) -> None:
    groups = {
        "memory": {"page_size": page_size, "num_pages": num_pages, "mem_fraction_static": share},
        "scheduling": {"max_running_requests": running},
    }
    machine = dataclasses.replace(MACHINE, free_bytes=free * MIB, num_ranks=num_ranks)
    try:
        config = resolve(settings(**groups), MODEL, machine)
    except ConfigError as error:
        assert "--mem-fraction-static" in str(error)
        return
    assert config.chunk_len % config.page_size == config.split_tokens % config.page_size == 0
    assert 1 <= config.context_len <= config.num_pages[0] * config.page_size
    assert config.step_len >= config.chunk_len
    if num_pages == "auto":
        step_bytes = config.max_running_requests * MIB
        assert (
            config.kv_bytes + MODEL.weight_bytes(config.dtype, config.quantization, config.device) + step_bytes
        ) * num_ranks <= machine.free_bytes


def test_workers_on_gpus_of_their_own_share_cores_and_no_memory() -> None:
    apart = machine_of(device="cuda", num_cores=9, free_bytes=8192 * MIB, num_ranks=2, num_devices=2)
    together = dataclasses.replace(apart, num_devices=1)
    assert resolved(machine=apart).num_threads == resolved(machine=together).num_threads == 4
    assert resolved(machine=apart).num_pages[0] > 2 * resolved(machine=together).num_pages[0]


def test_weights_are_counted_as_the_device_keeps_them() -> None:
    """A CPU may keep an output matrix twice."""

    def pages(facts: ModelFacts, machine: MachineFacts) -> int:
        return resolved(facts, machine, memory={"page_size": 16}).num_pages[0]

    twice = dataclasses.replace(MODEL, weight_bytes=lambda dtype, quantization, device: (1 + (device == "cpu")) * MIB)
    one, two = (dataclasses.replace(MODEL, weight_bytes=lambda *_, mib=mib: mib * MIB) for mib in (1, 2))
    assert pages(twice, CUDA) == pages(one, CUDA) > pages(two, CUDA)
    assert pages(twice, MACHINE) == pages(two, MACHINE) < pages(one, MACHINE)
    most = pages(one, CUDA)
    full = dataclasses.replace(CUDA, total_bytes=most * 16 * 2048 + MIB)
    assert resolved(twice, full, memory={"page_size": 16, "num_pages": most}).num_pages == (most,)
    with pytest.raises(ConfigError, match="--num-pages"):
        resolved(two, full, memory={"page_size": 16, "num_pages": most})


@pytest.mark.parametrize("share", ["auto", 0.9, 0.5])
def test_prefill_and_decode_on_one_gpu_fit_into_its_share(share: float | str) -> None:
    """Each gets half of what is asked for, weights and the scratch of a step included."""
    alone = machine_of(device="cuda", num_cores=8, free_bytes=8192 * MIB)
    both = dataclasses.replace(alone, num_ranks=2, transports=transport_facts(in_one_serve=True))
    memory = {"mem_fraction_static": share, "page_size": 16}
    found = resolved(machine=both, memory=memory)
    assert found.transfer_backend == "local"
    budget = int(8192 * MIB * (0.85 if share == "auto" else float(share)))
    used = found.kv_bytes + MODEL.weight_bytes(found.dtype, "none", "cuda")
    assert 2 * used <= budget
    assert found.num_pages[0] <= resolved(machine=alone, memory=memory).num_pages[0]
    with pytest.raises(ConfigError, match=r"static 0.01: .* for each of 2 worker processes .* raise it, or take fewer"):
        resolved(machine=both, memory={"mem_fraction_static": 0.01})


def test_transfers_of_cuda_memory_need_a_transport_for_it() -> None:
    cuda = machine_of(device="cuda", num_cores=8, free_bytes=8192 * MIB)
    assert resolved().transfer_tls == "tcp,self"
    assert resolved(machine=cuda).transfer_tls == "tcp,cuda_copy,self"
    assert resolved(machine=cuda, disaggregation={"transfer_tls": "rc,cuda_copy"}).transfer_tls == "rc,cuda_copy"


@pytest.mark.parametrize("machine", [MACHINE, CUDA], ids=["cpu", "cuda"])
def test_local_transfers_are_between_workers_of_one_serve(machine: MachineFacts) -> None:
    local = {"disaggregation_transfer_backend": "local"}
    one_serve = dataclasses.replace(machine, transports=transport_facts(in_one_serve=True))
    assert resolved(machine=one_serve, disaggregation=local).transfer_backend == "local"
    assert resolved(machine=one_serve).transfer_backend == "local"
    assert resolved(machine=machine).transfer_backend == "nixl"
    with pytest.raises(ConfigError, match="backend local: only between workers of one `deltaserve serve`"):
        resolved(machine=machine, disaggregation=local)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_gpus_that_do_not_reach_each_other_take_another_transport(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of one GPU are copied there in any case; a CPU's are no matter of GPUs."""
    cut_off = dataclasses.replace(
        local_kind.KIND, gpu_problem=lambda num: "cuda:0 does not reach cuda:1" if num > 1 else None
    )
    monkeypatch.setattr(local_kind, "KIND", cut_off)
    transports = transport_facts(in_one_serve=True, num_gpus=num_gpus)
    on_gpus = dataclasses.replace(CUDA, num_ranks=2, num_devices=num_gpus, transports=transports)
    assert resolved(machine=on_gpus).transfer_backend == ("local" if num_gpus == 1 else "nixl")
    on_cpu = dataclasses.replace(MACHINE, transports=transports)
    assert resolved(machine=on_cpu).transfer_backend == "local"


def test_one_gpu_needs_no_driver_to_be_asked() -> None:
    assert local_kind.KIND.gpu_problem(1) is None
    if not torch.cuda.is_available():
        said = local_kind.KIND.gpu_problem(2)
        assert said is not None and "libcuda" in said


def test_a_transport_that_reads_no_tls_is_not_chosen_where_one_is_given() -> None:
    one_serve = dataclasses.replace(MACHINE, transports=transport_facts(in_one_serve=True))
    assert resolved(machine=one_serve).transfer_backend == "local"
    given = resolved(machine=one_serve, disaggregation={"transfer_tls": "rc,self"})
    assert (given.transfer_backend, given.transfer_tls) == ("nixl", "rc,self")


def test_a_transport_moves_the_memory_of_the_device_or_is_refused() -> None:
    cuda = machine_of(device="cuda", num_cores=8, free_bytes=8192 * MIB)
    mooncake = {"disaggregation_transfer_backend": "mooncake"}
    assert resolved(disaggregation=mooncake).transfer_tls == "tcp"
    with pytest.raises(ConfigError, match="backend mooncake: moves CPU memory only; add --device cpu"):
        resolved(machine=cuda, disaggregation=mooncake)


def test_without_a_transport_for_the_device_only_one_worker_that_does_both_can_be() -> None:
    transports = {"hand": TransportFacts({"cpu": "by foot"})}
    cuda = machine_of(device="cuda", num_cores=8, free_bytes=8192 * MIB, transports=transports)
    with pytest.raises(ConfigError, match="backend auto: there is none that moves memory of cuda"):
        resolved(machine=cuda)
    assert not resolved(machine=cuda, disaggregation={"disaggregation_mode": "null"}).moves_pages


def test_a_context_that_the_pool_shortens_is_remembered() -> None:
    short = resolved(memory={"num_pages": 2, "page_size": 16})
    assert (short.context_len, short.shortened_from) == (32, MODEL.context_len)
    assert resolved().shortened_from is None


def test_each_rank_of_a_worker_needs_a_gpu_of_its_own() -> None:
    machine = machine_of(device="cuda", num_cores=9, free_bytes=8192 * MIB, num_ranks=4, num_devices=2)
    assert resolve(settings(), dataclasses.replace(MODEL, tp_size=2), machine).device == "cuda"
    with pytest.raises(ConfigError, match="--tp-size 4: each rank needs a GPU of its own, and 2 can be used here"):
        resolve(settings(), dataclasses.replace(MODEL, tp_size=4), machine)


def test_no_role_takes_longer_requests_than_another() -> None:
    large = resolved(machine=dataclasses.replace(MACHINE, free_bytes=1 << 36))
    small = resolved(memory={"num_pages": 4})
    both = of_one_context({Role.PREFILL: large, Role.DECODE: small})
    assert [config.context_len for config in both.values()] == [256, 256]
    assert both[Role.PREFILL].shortened_from == both[Role.DECODE].shortened_from == large.context_len
    assert both[Role.PREFILL].num_pages == large.num_pages
