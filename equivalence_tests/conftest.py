"""Without a GPU the tests run in Triton's interpreter, corrected; hypothesis draws the same examples every time."""

import os

import torch
from hypothesis import HealthCheck, settings

# Before triton is imported: whether kernels are interpreted is decided then.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Interpreted tensors are small; a second thread that waits for a busy core makes torch several times slower.
    torch.set_num_threads(1)

from equivalence_tests.harness import interpreter

interpreter.correct()

# No deadline: an interpreted kernel takes its time, and the first launch on a GPU compiles.
settings.register_profile("ci", derandomize=True, deadline=None, database=None, max_examples=20)
settings.register_profile(
    "deep", deadline=None, database=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
