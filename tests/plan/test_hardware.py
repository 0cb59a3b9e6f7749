from __future__ import annotations

import pytest

from rose.plan.hardware import GPUS, gpu


def test_the_gpus_of_the_issue_are_there_each_with_a_source() -> None:
    assert set(GPUS) == {"H100", "H800", "H20", "A100", "L40S"}
    for found in GPUS.values():
        assert "NVIDIA" in found.source and "datasheet" in found.source


@pytest.mark.parametrize("name", ["H100", "h100", "H100 SXM", "h100 sxm"])
def test_names_in_any_case(name: str) -> None:
    assert gpu(name) is GPUS["H100"]


def test_peaks_are_dense() -> None:
    """With sparsity they would be twice as high, past what the memory could ever feed."""
    for found in GPUS.values():
        assert 30 < found.bf16_flops / found.hbm_bytes_per_s < 450
    assert GPUS["H800"].bf16_flops == GPUS["H100"].bf16_flops
    assert GPUS["H800"].link_bytes_per_s < GPUS["H100"].link_bytes_per_s / 2


def test_an_unknown_one_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="GPU B300 is not known: take one of H100, H800, H20"):
        gpu("B300")
