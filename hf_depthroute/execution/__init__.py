"""How a routed sublayer is computed: `masked` (training, both paths for every token) or `gathered` (inference)."""

from .gathered import CPU_SLICE, gathered_update
from .masked import Path, masked_update

__all__ = ["CPU_SLICE", "Path", "gathered_update", "masked_update"]
