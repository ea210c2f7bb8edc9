"""What holds for every test, before the first matrix product of the process and the first import of Triton."""

import os
import signal

# As parallel.mesh.start sets it in the ranks: MKL reads it once, and results are compared with theirs bit for bit.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# Triton kernels run in its interpreter, on CPU tensors. Triton reads this when a kernel is defined.
os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell starts what runs in its background with SIGINT ignored, and so would the ranks be that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
