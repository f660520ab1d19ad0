"""Which types of weights a CPU multiplies slowly, by the flags Linux names."""

from pathlib import Path

import pytest

from deltaserve.launch.cpu import read_cpuinfo, slow_dtypes

ZEN_1 = "processor\t: 0\nflags\t\t: fpu sse4_2 avx avx2 fma f16c\n\nprocessor\t: 1\n"
CASCADE_LAKE = "flags\t\t: avx2 fma avx512f avx512bw avx512vl avx512_vnni\n"
ZEN_5 = "flags\t\t: avx2 avx512f avx512bw avx512vl avx512_bf16 avx512_vnni\n"
SAPPHIRE_RAPIDS = "flags\t\t: avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile\n"
GRAVITON_3 = "Features\t: fp asimd fphp asimdhp sve bf16 i8mm\n"
GRAVITON_2 = "Features\t: fp asimd fphp asimdhp\n"
BOTH = {"bfloat16", "float16"}


@pytest.mark.parametrize(
    ("cpuinfo", "slow"),
    [
        (ZEN_1, BOTH),
        (CASCADE_LAKE, BOTH),
        (ZEN_5, {"float16"}),
        (SAPPHIRE_RAPIDS, set()),
        (GRAVITON_3, set()),
        (GRAVITON_2, {"bfloat16"}),
        ("", BOTH),
    ],
    ids=["zen 1", "cascade lake", "zen 5", "sapphire rapids", "graviton 3", "graviton 2", "unknown"],
)
def test_slow_dtypes(cpuinfo: str, slow: set[str]) -> None:
    assert slow_dtypes(cpuinfo) == slow


def test_a_machine_without_cpuinfo(tmp_path: Path) -> None:
    assert read_cpuinfo(tmp_path / "missing") == ""
