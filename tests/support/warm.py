"""Do once, in the process that tests fork others from, what each of them would do for a second or two of its own.

No tensor is computed: threads of that are lost in a fork.
"""

import contextlib
import gc

from tests.support.runs import config

config("--device=cpu")
with contextlib.suppress(ImportError):  # older versions have none
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")
gc.collect()
gc.freeze()  # a collection would look at all of it, and so copy it
