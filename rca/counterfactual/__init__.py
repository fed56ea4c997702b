"""Counterfactual attribution (spec R4): what the victim would have seen with a cause back to normal."""
