"""Proof, on the reader's own machine, that `fast` computes what `reference` defines: `python -m equivalence_tests`."""
