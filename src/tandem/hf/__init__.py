"""The interface to Transformers: config, quantizer, experts function, loading and saving.

Loads Transformers first: `tandem.registration` has then registered everything before any of it is
used, whichever module a user imports first.
"""

import transformers.quantizers.auto  # noqa: F401
