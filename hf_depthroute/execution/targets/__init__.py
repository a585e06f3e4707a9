"""The parts of a decoder layer that can be routed: one class per target, in a file of its own."""

from ...parts.targets import TARGETS
from .attention import AttentionTarget
from .block import BlockTarget
from .experts import ExpertsTarget
from .ffn import FFNTarget
from .memory import MemoryTarget

TARGETS.update(
    ffn=FFNTarget(),
    attention=AttentionTarget(),
    block=BlockTarget(),
    experts=ExpertsTarget(),
    memory=MemoryTarget(),
)
