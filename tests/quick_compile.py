"""Tests compile more than they run: flags with which XLA compiles a decoder for the CPU in a sixth of the time.

Without LLVM's optimizations, and with the emitter of LLVM's code that XLA had before its fusions went through MLIR. A
user's own settings are what the slow test of test_quickstart.py runs with.
"""

from importlib.metadata import version

QUICK_COMPILE = "--xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):  # XLA ends a process whose flag it does not know
    QUICK_COMPILE += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def compile_few_shapes(count: int = 1) -> None:
    """Forwards of decoders are compiled for so many numbers of tokens instead of six or four, in a part of the time."""
    from refusion_jax.systems import masked
    from refusion_jax.systems.refusion import budget

    budget._SHAPES = masked._WIDTHS = count
