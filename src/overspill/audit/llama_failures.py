"""What llama.cpp says by itself when a placement is not as it was meant."""

from __future__ import annotations

from overspill.audit.failures import Failure

FAILURES = (
    Failure(
        "mmap_override",
        "mmap-with-cpu-experts",
        "warning",
        "weights that were overridden to the CPU stay in a mapping of the file: they are not pinned, so prompts "
        "are copied "
        "to the GPU slowly, and pages come one fault at a time in router order; under memory pressure one report "
        "has 1.2 "
        "against 23.4 tokens/s.",
        "--load-mode none (older: --no-mmap) where host memory holds them; overspill reads experts into pinned memory, "
        "or streams them past the page cache",
    ),
    Failure(
        "unknown_buffer",
        "override-refused",
        "error",
        "-ot takes only the default buffer type of each device (CPU, CUDA0, CUDA1, …); CUDA_Host and CPU_REPACK "
        "cannot be "
        "named (llama.cpp#14925, #28223).",
        "name one of the listed types; for pinned host memory use =CPU with --load-mode none",
    ),
    Failure(
        "mlock_failed",
        "lock-refused",
        "warning",
        "the weights were to be locked in memory, and the limit on locked memory is smaller: the system may page "
        "them out.",
        "ulimit -l unlimited (or LimitMEMLOCK=infinity in the unit), or less to lock",
    ),
    Failure(
        "pin_failed",
        "pinning-failed",
        "warning",
        "the driver gave no pinned memory for the weights on the host, so they are pageable: prompts are slower "
        "(some versions stop with an out-of-memory error of CUDA instead, ollama#11772).",
        "fewer layers or experts on the CPU, or GGML_CUDA_NO_PINNED=1 to go without",
    ),
)
