"""How good a routed model is, compared with its dense base."""

from .perplexity import BEHIND_PROMPTS, BudgetRow, evaluate_budgets, mean_loss

__all__ = ["BEHIND_PROMPTS", "BudgetRow", "evaluate_budgets", "mean_loss"]
