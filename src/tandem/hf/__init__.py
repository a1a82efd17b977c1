"""The seam with Transformers: config, quantizer, experts function, loading and saving.

Loads Transformers first of all: `tandem.registration` then has registered what is in here before
any of it is used, whichever module a user imports first.
"""

import transformers.quantizers.auto  # noqa: F401
