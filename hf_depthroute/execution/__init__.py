"""From a decision to a result: the routed layer and the executors that run the chosen rows."""
