"""What a model is pulled to compute in, where nobody says."""

import pytest

from cli.models import faster_dtype


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("avx512f avx512_vnni", "float32"),
        ("avx512f avx512_bf16", "bfloat16"),
        ("amx_bf16 amx_tile", "bfloat16"),
        ("avx512_bf16x", "float32"),
    ],
)
def test_bfloat16_only_where_the_processor_has_it(tmp_path, flags, dtype):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu vme {flags} fsrm\n")
    assert faster_dtype(cpuinfo) == dtype


def test_a_machine_that_does_not_say_computes_in_float32(tmp_path):
    assert faster_dtype(tmp_path / "nowhere") == "float32"
