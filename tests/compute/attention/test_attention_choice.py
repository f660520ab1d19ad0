"""Native attention where it works; torch, with one line that says why, where it does not."""

import importlib
import logging
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from deltaserve.compute.attention import attention_choice, opening
from deltaserve.compute.attention.attention_backend import AttentionBackend
from deltaserve.compute.attention.attention_choice import make_attention, open_native
from deltaserve.compute.attention.native import native_attention
from deltaserve.compute.attention.native.native_attention import NativeAttention
from deltaserve.compute.attention.reference.torch_attention import TorchAttention
from deltaserve.compute.attention.registry import attention_kind
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.compute.native.native_library import NativeLibrary, NativeUnavailable
from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageGroup
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from tests.compute.attention import flashinfer_reference
from tests.compute.attention.triton_process import KernelProcess, needs_triton, run_in
from tests.compute.native.native_build import compiled_library


def make(choice: str, group: PageGroup, num_heads: int = 8) -> AttentionBackend:
    pool = KvPool(CacheSpec(16, (group,)), (4,), torch.device("cpu"))
    native = open_native(choice, torch.device("cpu"), 1)
    return make_attention(choice, native, pool, PageTable(1, 2, 4), (num_heads,))


GROUP = PageGroup("kv", 1, 2, 64, DType.FLOAT32)
HALF_GROUP = replace(GROUP, dtype=DType.FLOAT16)


def no_library(library: NativeLibrary) -> None:
    raise NativeUnavailable("there is none")


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("choice", ["auto", "native"])
def test_native_passes_its_test_for_every_type(choice: str, dtype: DType, caplog: pytest.LogCaptureFixture) -> None:
    library = compiled_library()
    with caplog.at_level(logging.INFO):
        assert isinstance(make(choice, PageGroup("kv", 3, 2, 64, dtype)), NativeAttention)
        assert isinstance(make(choice, PageGroup("kv", 3, 1, 40, dtype, planes=1, latent_dim=32)), NativeAttention)
    assert {record.message for record in caplog.records} == {f"attention: native, {library.instruction_sets[-1].name}"}


def test_torch_when_asked_for() -> None:
    assert isinstance(make("torch", GROUP), TorchAttention)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(NativeLibrary, "__init__", no_library)
    with caplog.at_level(logging.INFO):
        assert isinstance(make("auto", GROUP), TorchAttention)
    assert [record.message for record in caplog.records] == ["attention: torch (no native library: there is none)"]
    with pytest.raises(ConfigError, match="--attention-backend native: there is none"):
        make("native", GROUP)


def test_a_library_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = compiled_library()
    monkeypatch.setattr(native_attention, "TOLERANCES", {torch.float32: -1.0})
    with caplog.at_level(logging.WARNING):
        assert isinstance(make("auto", GROUP), TorchAttention)
    tried = [record.message.split()[4] for record in caplog.records]
    assert tried == [one.name for one in reversed(library.instruction_sets)]
    with pytest.raises(ConfigError, match="no instruction set computes here what torch does"):
        make("native", GROUP)


def test_a_slower_instruction_set_where_the_fastest_computes_something_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    *_, slower, fastest = compiled_library().instruction_sets
    differences = iter((float("nan"), 0.0, 0.0))
    monkeypatch.setattr(native_attention, "self_test_error", lambda *_: next(differences))
    with caplog.at_level(logging.INFO):
        assert isinstance(make("native", PageGroup("kv", 1, 2, 64, DType.BFLOAT16)), NativeAttention)
    assert [record.message for record in caplog.records] == [
        f"attention: the self-test on {fastest.name} differs from torch by nan",
        f"attention: native, {slower.name}",
    ]


def test_a_missing_file_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeLibrary.__init__, "__defaults__", (tmp_path / "none.so",))
    with pytest.raises(ConfigError, match="not compiled"):
        make("native", GROUP)


@needs_triton
def test_triton_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="--attention-backend triton: it computes on GPUs, and the pages are on cpu"):
        make("triton", GROUP)


@pytest.mark.parametrize("choice", ["triton", "flashinfer"])
def test_without_the_package(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for by name is never left to torch."""
    kind = replace(attention_kind(choice), module="a_module_that_nobody_has")
    monkeypatch.setattr(attention_choice, "attention_kind", lambda _: kind)
    with pytest.raises(ConfigError, match=rf"--attention-backend {choice}: No module .*deltaserve\[{choice}\]"):
        make(choice, HALF_GROUP)


def test_a_package_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = importlib.import_module

    def broken(name: str) -> ModuleType:
        if name.endswith(".kind"):
            return imported(name)
        raise RuntimeError(f"{name}: versions differ\nat length")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(ConfigError, match=r"flashinfer: importing it ends with RuntimeError: .*: versions differ$"):
        make("flashinfer", HALF_GROUP)


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (GROUP, "float16 and bfloat16, and pages are kept in float32"),
        (replace(HALF_GROUP, head_dim=80), "no kernels for heads of 80 channels, only for 64, 128, 256"),
        (replace(HALF_GROUP, num_kv_heads=1, head_dim=576, planes=1, latent_dim=512), "one latent that serves as both"),
    ],
)
def test_pages_that_flashinfer_cannot_read_are_refused(group: PageGroup, why: str) -> None:
    """Before the package is looked for."""
    with pytest.raises(ConfigError, match=f"--attention-backend flashinfer: it .*{why}"):
        make("flashinfer", group)


def check_flashinfer() -> None:
    for dtype in (DType.BFLOAT16, DType.FLOAT16, DType.FP8_E4M3):
        for retention in (KEEP_ALL, Retention(Lifetime.WINDOW, 20)):
            group = PageGroup("kv", 3, 2, 64, dtype, retention)
            assert type(make("flashinfer", group, 4)).__name__ == "FlashInferAttention"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(opening, "TOLERANCES", {torch.float16: -1.0})
        with pytest.raises(ConfigError, match="backend flashinfer: its self-test on cpu differs from torch by"):
            make("flashinfer", HALF_GROUP)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flashinfer_reference.BatchPrefillWithPagedKVCacheWrapper, "run", None)
        with pytest.raises(ConfigError, match="backend flashinfer: its self-test ends with TypeError: 'NoneType'"):
            make("flashinfer", HALF_GROUP)


@needs_triton
def test_flashinfer_passes_its_test_for_every_type_that_it_has(process_with_flashinfer: KernelProcess) -> None:
    run_in(process_with_flashinfer, check_flashinfer)


def check_interpreted() -> None:
    """Kernels that compute something else, or nothing, are not used."""
    for dtype in DType:
        for group in (PageGroup("kv", 3, 2, 64, dtype), PageGroup("kv", 3, 1, 40, dtype, planes=1, latent_dim=32)):
            assert type(make("triton", group, 4)).__name__ == "TritonAttention"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(opening, "TOLERANCES", {torch.float32: -1.0})
        with pytest.raises(ConfigError, match="backend triton: its self-test on cpu differs from torch by"):
            make("triton", GROUP)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("deltaserve.compute.attention.triton.triton_attention.TritonStep.write_kv", lambda *_: None)
        with pytest.raises(ConfigError, match="backend triton: its self-test on cpu differs from torch by"):
            make("triton", GROUP)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("deltaserve.compute.attention.triton.triton_attention.partial_results", None)
        with pytest.raises(ConfigError, match="backend triton: its self-test ends with TypeError: 'NoneType'"):
            make("triton", GROUP)


@needs_triton
def test_triton_passes_its_test_for_every_type(process: KernelProcess) -> None:
    run_in(process, check_interpreted)
