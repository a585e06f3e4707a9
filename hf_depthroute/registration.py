"""Registration at import: PEFT learns the method, and subpackages add their hooks."""

from .adapter import peft_hooks, tuner
from .card import peft_cards
from .evaluation.cost import cost_remark
from .report.tokens import view_of
from .routing.trace import RouteTrace
from .training import every_trainer

tuner.register()
peft_cards.install()
tuner.after_injection.append(every_trainer.install)
peft_hooks.remarks.append(cost_remark)
RouteTrace.make_view = view_of
