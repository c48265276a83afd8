"""Put `fast` operations into models that others wrote, and take them out again."""

from fast.integrations.transformers import Entry, Report, patch, patched, unpatch

__all__ = ["Entry", "Report", "patch", "patched", "unpatch"]
