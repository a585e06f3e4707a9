"""How a routed part is computed: `masked` (training, both paths for every token) or only where it was chosen."""

from .attention import attended_rows, supports_subset
from .experts import Pairs, routed_pairs
from .gathered import CPU_SLICE, add_cheap, gathered_update, in_slices
from .masked import masked_update

__all__ = [
    "CPU_SLICE",
    "Pairs",
    "add_cheap",
    "attended_rows",
    "gathered_update",
    "in_slices",
    "masked_update",
    "routed_pairs",
    "supports_subset",
]
