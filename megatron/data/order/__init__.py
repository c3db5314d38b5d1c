"""The order of samples: permutations, packing, blends, Pythia's order."""
