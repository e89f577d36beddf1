from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import overspill.config
from overspill.config import (
    FLAGS,
    EngineSettings,
    ExpertStreamConfig,
    ExtensionConfig,
    OffloadConfig,
    PlacementConfig,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
)
from overspill.config.environment import DISABLE_PIN_MEMORY, DISABLE_UVA, OVERRIDES
from overspill.config.extension import DeviceFitConfig, MmapConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys, overspill.config as c\n"
        "c.resolve('{\"uva\": {\"cpu_offload_gb\": 4}}', engine={'device': 'emulated'}, environ={})\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'huggingface_hub') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_every_public_name_exists() -> None:
    assert [name for name in overspill.config.__all__ if not hasattr(overspill.config, name)] == []


def test_the_page_tells_of_every_field_variable_and_flag() -> None:
    page = PAGE.read_text(encoding="utf-8")
    documents = (
        OffloadConfig,
        UVAOffloadConfig,
        PrefetchOffloadConfig,
        ExtensionConfig,
        MmapConfig,
        ExpertStreamConfig,
        DeviceFitConfig,
        PlacementConfig,
        EngineSettings,
    )
    names = [name for document in documents for name in document.model_fields]
    missing = [name for name in (*names, *OVERRIDES, DISABLE_PIN_MEMORY, DISABLE_UVA) if f"{name}`" not in page]
    missing += [flag for flag in FLAGS if f"`--{flag.replace('_', '-')}" not in page]
    assert missing == []
