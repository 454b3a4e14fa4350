"""What the machine does: host memory and cores everywhere, GPU counters of NVIDIA's library where there is one.

Each learner rank reads its own GPU, and a reader beside each engine its engine's (engine_gpus.py). Counters that a GPU
does not have are left out. nvidia-ml-py is optional.
"""
from __future__ import annotations

import time

import psutil

_ALL_LINKS = 0xFFFFFFFF


def host() -> dict[str, float]:
    """Of this machine: memory in use, and cores busy since the last call."""
    return {"machine/memory": psutil.virtual_memory().used / 1e9,
            "machine/memory_share": psutil.virtual_memory().percent / 100,
            "machine/cores": psutil.cpu_percent() / 100 * psutil.cpu_count(),
            "machine/process_memory": psutil.Process().memory_info().rss / 1e9}


class Gpus:
    """Counters of some GPUs of this machine, by their UUIDs ("GPU-…")."""

    def __init__(self):
        self._nvml = _nvml()
        self._before: dict[str, tuple[float, dict[str, float]]] = {}

    def uuids(self) -> list[str]:
        """All of the machine, whatever CUDA_VISIBLE_DEVICES says; none without NVIDIA's library."""
        nvml = self._nvml
        return [nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))
                for index in range(nvml.nvmlDeviceGetCount())] if nvml else []

    def read(self, uuid: str) -> dict[str, float]:
        """By name of GPU_FIELDS; rates since the last call for this GPU."""
        if self._nvml is None:
            return {}
        nvml, gpu = self._nvml, self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        sources = {
            "utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "memory": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9,
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "pcie": lambda: 1e3 / 1e9 * sum(nvml.nvmlDeviceGetPcieThroughput(gpu, way) for way in (
                nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)),
            "ecc_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)}
        counters = {"power": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,  # joules
                    "nvlink": lambda: self._nvlink(gpu) * 1024 / 1e9}
        return self._known(sources) | self._rates(uuid, self._known(counters))

    def _known(self, sources: dict) -> dict[str, float]:
        found = {}
        for name, source in sources.items():
            try:
                found[name] = float(source())
            except self._nvml.NVMLError:  # not supported by this GPU or driver
                continue
        return found

    def _nvlink(self, gpu) -> int:
        """KiB that went over all links, both ways."""
        nvml = self._nvml
        values = nvml.nvmlDeviceGetFieldValues(gpu, [(nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
                                                     (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS)])
        for value in values:
            if value.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(value.nvmlReturn)
        return sum(value.value.ullVal for value in values)

    def _rates(self, uuid: str, counts: dict[str, float]) -> dict[str, float]:
        now, (then, before) = time.monotonic(), self._before.get(uuid, (0.0, {}))
        self._before[uuid] = now, counts
        return {name: (count - before[name]) / max(now - then, 1e-9) for name, count in counts.items()
                if name in before}


GPU_FIELDS = {
    "utilisation": ("share", "time in which a kernel ran, over the library's last sampling period (up to 1 s)"),
    "memory": ("GB", "memory in use"),
    "power": ("W", "mean since the step before"),
    "temperature": ("°C", "of the GPU"),
    "nvlink": ("GB/s", "over all links, both ways, mean since the step before"),
    "pcie": ("GB/s", "both ways, over 20 ms"),
    "ecc_errors": ("errors", "uncorrected, since the driver was loaded")}
"""(unit, meaning)."""


def _nvml():
    """NVIDIA's library, initialised; None where the package or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
