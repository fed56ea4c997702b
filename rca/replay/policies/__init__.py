"""Policies of the replay, behind the interface of `rca.replay.policies.base`."""
