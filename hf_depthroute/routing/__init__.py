"""From a stream to a decision: scores, thresholds, the plan of a forward pass and the
trace it leaves."""
