"""How a routed sublayer is computed: `masked` (training, both paths for every token) or `gathered` (inference)."""

from .gathered import gathered_update
from .masked import masked_update

__all__ = ["gathered_update", "masked_update"]
