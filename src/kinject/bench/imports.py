"""What every run of a bench imports, for seconds each time: runs on a CPU are forked from a process that has it."""

import contextlib
import io

with contextlib.redirect_stderr(io.StringIO()):  # libraries tell of kernels that no run asked for
    import trl.trainer.sft_config  # noqa: F401

    import kinject.train.run
    import kinject.train.setup
    import kinject.train.trainer  # noqa: F401
