"""What the equivalence tests are made of; each module is imported by itself, so that a light one stays light."""
