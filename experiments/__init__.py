"""What fusion buys: a ladder per operation, and `bench`, the only timing driver. Not part of the distribution."""
