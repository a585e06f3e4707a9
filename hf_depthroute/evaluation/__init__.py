"""How good a routed model is, compared with its dense base."""

from .perplexity import BudgetRow, evaluate_budgets, mean_loss

__all__ = ["BudgetRow", "evaluate_budgets", "mean_loss"]
