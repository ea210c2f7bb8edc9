"""What holds for every test, before the first matrix product of the process."""

import os

# As parallel.mesh.start sets it in the ranks: MKL reads it once, and results are compared with theirs bit for bit.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
