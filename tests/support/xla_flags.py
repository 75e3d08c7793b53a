"""Flags of XLA for code that runs once: it need not be good, only soon there. They save three quarters of
compiling. The last one is gone in jaxlib 0.11, which ends at a flag it does not know."""


def flags(devices: int) -> str:
    count = f"--xla_force_host_platform_device_count={devices}"
    return f"{count} --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
