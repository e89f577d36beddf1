"""What lies on disk: safetensors and GGUF headers as records and extents. Tensor data is never read here."""

from overspill.checkpoint.locate import open_checkpoint
from overspill.checkpoint.records import Checkpoint, Encoding, Extent, TensorRecord
from overspill.checkpoint.stamp import FileStamp, file_stamp, stamps, verify_unchanged, verify_untouched

__all__ = [
    "Checkpoint",
    "Encoding",
    "Extent",
    "FileStamp",
    "TensorRecord",
    "file_stamp",
    "open_checkpoint",
    "stamps",
    "verify_unchanged",
    "verify_untouched",
]
