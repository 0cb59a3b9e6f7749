"""What GPUs can do at best, from their datasheets.

Tensor-core peaks are dense: datasheets print the number with 2:4 sparsity, which is twice as much
and which no engine here uses. Gigabytes are 10^9 bytes: devices report up to 7 % more, which the
driver needs. Links are per direction, datasheets print both together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    name: str
    bf16_flops: float
    hbm_bytes_per_s: float
    hbm_bytes: float
    link_bytes_per_s: float
    """To the other GPUs of its host, in one direction."""
    source: str


GPUS: dict[str, Gpu] = {
    "H100": Gpu(
        "H100 SXM",
        989e12,
        3.35e12,
        80e9,
        450e9,
        "NVIDIA H100 Tensor Core GPU datasheet, SXM: 1,979 TFLOPS with sparsity, NVLink 900 GB/s",
    ),
    "H800": Gpu(
        "H800 SXM",
        989e12,
        3.35e12,
        80e9,
        200e9,
        "NVIDIA H800 Tensor Core GPU datasheet, SXM: as H100, but NVLink 400 GB/s",
    ),
    "H20": Gpu(
        "H20",
        148e12,
        4.0e12,
        96e9,
        450e9,
        "NVIDIA H20 datasheet, 96 GB: 148 TFLOPS dense, 4.0 TB/s, NVLink 900 GB/s",
    ),
    "A100": Gpu(
        "A100-80G",
        312e12,
        2.039e12,
        80e9,
        300e9,
        "NVIDIA A100 80GB datasheet, SXM: 312 TFLOPS dense, 2,039 GB/s, NVLink 600 GB/s",
    ),
    "L40S": Gpu(
        "L40S",
        362e12,
        864e9,
        48e9,
        32e9,
        "NVIDIA L40S datasheet: 362 TFLOPS dense, 864 GB/s (GDDR6), PCIe Gen4 x16 64 GB/s",
    ),
}


def gpu(name: str) -> Gpu:
    """By its short name or the one on the datasheet, in any case."""
    wanted = name.casefold()
    for key, found in GPUS.items():
        if wanted in (key.casefold(), found.name.casefold()):
            return found
    raise ValueError(f"GPU {name} is not known: take one of {', '.join(GPUS)}.")
