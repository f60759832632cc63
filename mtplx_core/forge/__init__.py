"""Makes a multi-token-prediction head for a model that has none: collect answers and states, train, verify."""
