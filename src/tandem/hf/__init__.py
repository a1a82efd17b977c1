"""The interface to Transformers: config, quantizer, experts function, loading and saving.

Importing this package loads Transformers, so that `tandem.registration` has registered Tandem with
it before any module of the package is used, whichever a user imports first.
"""

import transformers.quantizers.auto  # noqa: F401
