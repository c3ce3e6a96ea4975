"""GPUs: public specifications of every value of `hardware.gpuSku`.

Sources are the vendors' data sheets. Rates are dense, without sparsity; bandwidths of interconnects are per GPU and direction.
"""

from dataclasses import dataclass, replace

from dynamo.core.errors import ConfigError

GIB = 2**30
ALIASES = {"gb200_sxm": "gb200"}
"""Legacy values of `gpuSku`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU."""

    sku: str
    memory_gib: float
    bandwidth_gb_s: float
    """Peak bandwidth of the memory in 10^9 bytes per second."""
    tflops_16: float
    """Peak of BF16, or FP16 where the GPU has no BF16, in 10^12 operations per second."""
    tflops_8: float | None = None
    """Peak of FP8; None if 8-bit weights are computed in 16 bits."""
    tflops_4: float | None = None
    link_gb_s: float
    """Bandwidth to another GPU of the node in 10^9 bytes per second."""
    gpus_per_node: int = 8
    """Usual number of GPUs of a node."""
    watts: float

    def tflops(self, bits: float) -> float:
        """Return the peak rate of a matrix product with weights of this width."""
        if bits <= 4.5 and self.tflops_4 is not None:
            return self.tflops_4
        if bits <= 8 and self.tflops_8 is not None:
            return self.tflops_8
        return self.tflops_16


def _gpu(
    sku: str, memory: float, bandwidth: float, rates: tuple[float, ...], link: float, watts: float, node: int = 8
) -> GpuSpec:
    rate_8, rate_4 = (*rates, None, None)[1:3]
    return GpuSpec(
        sku=sku,
        memory_gib=memory,
        bandwidth_gb_s=bandwidth,
        tflops_16=rates[0],
        tflops_8=rate_8,
        tflops_4=rate_4,
        link_gb_s=link,
        watts=watts,
        gpus_per_node=node,
    )


GPUS = {
    spec.sku: spec
    for spec in (
        # name, GiB, memory GB/s, TFLOP/s of 16, 8 and 4 bits, link GB/s, watts, GPUs per node
        _gpu("vr_nvl72", 268, 22000, (4000, 17500, 35000), 1800, 1800, 4),
        _gpu("gb200", 173, 8000, (2500, 5000, 10000), 900, 1200, 4),
        _gpu("gb10", 119, 273, (125, 250, 500), 25, 140, 1),
        _gpu("b300_sxm", 268, 8000, (2250, 4500, 13500), 900, 1100),
        _gpu("b200_sxm", 168, 7700, (2250, 4500, 9000), 900, 1000),
        _gpu("h200_sxm", 131, 4800, (989, 1979), 450, 700),
        _gpu("h100_sxm", 80, 3350, (989, 1979), 450, 700),
        _gpu("h100_pcie", 80, 2000, (756, 1513), 64, 350),
        _gpu("a100_sxm", 80, 2039, (312,), 300, 400),
        _gpu("a100_pcie", 80, 1935, (312,), 32, 300),
        _gpu("a30", 24, 933, (165,), 32, 165, 4),
        _gpu("l40s", 45, 864, (362, 733), 32, 350),
        _gpu("l40", 45, 864, (181, 362), 32, 300),
        _gpu("l4", 22.5, 300, (121, 242), 32, 72),
        _gpu("v100_sxm", 32, 900, (125,), 150, 300),
        _gpu("v100_pcie", 32, 900, (112,), 16, 250),
        _gpu("t4", 15, 320, (65,), 16, 70),
        _gpu("mi200", 128, 3277, (383,), 400, 560),
        _gpu("mi300", 192, 5300, (1307, 2615), 448, 750),
    )
}


def gpu_spec(sku: str, memory_mib: float | None = None) -> GpuSpec:
    """Return a GPU's specification, with another size of memory if one is given. Raise `ConfigError` for an unknown one."""
    name = ALIASES.get(sku, sku)
    found = GPUS.get(name)
    if found is None:
        raise ConfigError(f"hardware.gpuSku: {sku!r}: must be one of {', '.join((*GPUS, *ALIASES))}")
    if memory_mib is None:
        return found
    return replace(found, memory_gib=memory_mib / 1024)
