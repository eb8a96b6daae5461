"""Costs of schemes for sparse gradients, as formulas of counts and of index sets."""
