"""Bits that change by themselves: hashes of the state, and steps that are computed twice."""
